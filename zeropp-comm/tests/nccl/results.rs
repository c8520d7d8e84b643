//! Every operation against naive references.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::*;

/// The values as `kind` holds them.
fn rounded(values: &[f32], kind: DType) -> Vec<f32> {
    floats(tensor(values, kind))
}

fn same(what: &str, got: Tensor<1>, want: &[f32], kind: DType) {
    assert_eq!(got.dtype(), kind, "{what}");
    let want: Vec<u32> = want.iter().map(|x| x.to_bits()).collect();
    assert_eq!(bits(got), want, "{what}");
}

/// Sums run in NCCL's order: within the rounding of `f32` additions, and of the type.
fn sum(what: &str, got: Tensor<1>, inputs: &[Vec<f32>], part: std::ops::Range<usize>, kind: DType) {
    assert_eq!(got.dtype(), kind, "{what}");
    let type_error = if kind == DType::BF16 { 2f64.powi(-8) } else { 0.0 };
    let got = floats(got);
    assert_eq!(got.len(), part.len(), "{what}");
    for (i, got) in part.zip(got) {
        let all = inputs.iter().map(|v| f64::from(v[i]));
        let (sum, size) = all.fold((0.0, 0.0), |(s, a), x| (s + x, a + x.abs()));
        let allowed = size * inputs.len() as f64 * f64::from(f32::EPSILON) + sum.abs() * type_error;
        assert!((f64::from(got) - sum).abs() <= allowed, "{what}: {got} for {sum} at {i}");
    }
}

/// All collectives at once, waited for backwards.
fn collectives(group: &Group, round: u64, part: usize, kind: DType) {
    let (me, size) = (group.rank(), group.size());
    let whole = part * size;
    let inputs: Vec<Vec<f32>> = (0..size).map(|r| rounded(&input(round, r, whole), kind)).collect();
    let mine = || tensor(&inputs[me], kind);
    let shard = |r: usize| &inputs[r][r * part..(r + 1) * part];
    let root = round as usize % size;
    let gathered = group.all_gather(tensor(shard(me), kind));
    let scattered = group.reduce_scatter(mine());
    let reduced = group.all_reduce(mine());
    let cast = group.broadcast(root, mine());
    let bytes = group.exchange(vec![me as u8; me * (part % 5000) + 1]);
    let brought = group.gather(root, vec![me as u8; me * (part % 5000) + 1]);
    let again = group.all_gather(tensor(shard(me), kind));
    let concatenated: Vec<f32> = (0..size).flat_map(shard).copied().collect();
    same("all_gather after the others", again.wait().unwrap(), &concatenated, kind);
    for (r, got) in bytes.wait().unwrap().iter().enumerate() {
        assert_eq!(*got, vec![r as u8; r * (part % 5000) + 1], "exchange");
    }
    let brought = brought.wait().unwrap();
    assert_eq!(brought.len(), if me == root { size } else { 0 }, "gather");
    for (r, got) in brought.iter().enumerate() {
        assert_eq!(*got, vec![r as u8; r * (part % 5000) + 1], "gather");
    }
    same("broadcast", cast.wait().unwrap(), &inputs[root], kind);
    let reduced = reduced.wait().unwrap();
    let reported =
        group.exchange(bits(reduced.clone()).iter().flat_map(|b| b.to_le_bytes()).collect());
    sum("all_reduce", reduced, &inputs, 0..whole, kind);
    let reported = reported.wait().unwrap();
    assert!(
        reported.iter().all(|bytes| *bytes == reported[0]),
        "an all_reduce is the same everywhere"
    );
    let mine = me * part..(me + 1) * part;
    sum("reduce_scatter", scattered.wait().unwrap(), &inputs, mine, kind);
    same("all_gather", gathered.wait().unwrap(), &concatenated, kind);
}

/// Messages round the ring both ways and to oneself, with tags in another order than the
/// receiver's, some received before they are sent and some after.
fn messages(group: &Group, round: u64, len: usize, kind: DType) {
    let (me, size) = (group.rank(), group.size());
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    let of = |r: usize, i: u64| rounded(&input(round * 16 + i, r, len), kind);
    let early = group.recv(last, u64::MAX, len, kind);
    let back = group.recv(next, 3, len, kind);
    for (i, tag) in [(0, 7), (1, u64::MAX), (2, 7), (3, u64::MAX)] {
        group.send(next, tag, tensor(&of(me, i), kind)).wait().unwrap();
    }
    group.send(last, 3, tensor(&of(me, 4), kind)).wait().unwrap();
    group.send(me, 1, tensor(&of(me, 5), kind)).wait().unwrap();
    let late = group.recv(last, u64::MAX, len, kind);
    let sevens = [0, 1].map(|_| group.recv(last, 7, len, kind));
    same("late", late.wait().unwrap(), &of(last, 3), kind);
    for (i, seven) in [0, 2].into_iter().zip(sevens) {
        same("seven", seven.wait().unwrap(), &of(last, i), kind);
    }
    same("early", early.wait().unwrap(), &of(last, 1), kind);
    same("back", back.wait().unwrap(), &of(next, 4), kind);
    same("own", group.recv(me, 1, len, kind).wait().unwrap(), &of(me, 5), kind);
}

/// Everything on the world and on sub-groups.
pub(crate) fn check(all: &Group, lens: &[usize]) {
    let (rank, size) = (all.rank(), all.size());
    let halves = all.split(&format!("half[{}]", rank % 2), rank % 2, size - rank).unwrap();
    assert_eq!(halves.size(), (size + 1 - rank % 2) / 2);
    assert_eq!(halves.rank(), (size - 1 - rank) / 2, "ordered by key, which runs backwards");
    let alone = all.split(&format!("alone[{rank}]"), rank, 0).unwrap();
    let mut round = 0;
    for &len in lens {
        for kind in [DType::F32, DType::BF16] {
            for group in [all, &halves, &alone] {
                round += 1;
                collectives(group, round, len, kind);
                messages(group, round, len, kind);
            }
        }
    }
    all.barrier().unwrap();
}

#[test]
fn all_operations_on_all_groups() {
    for size in [1, 2, 4] {
        on_ranks(size, patient(), |all, _| check(&all, &[0, 1, 5, 4099, 70_000]));
    }
}

#[test]
fn operations_wait_for_the_work_that_makes_their_buffers() {
    on_ranks(3, patient(), |all, device| {
        device.late_us.store(2000 + 1000 * all.rank() as u64, Ordering::Relaxed);
        check(&all, &[1, 3000]);
    });
}

#[test]
fn groups_may_be_used_in_different_orders_by_different_ranks() {
    on_ranks(2, patient(), |all, _| {
        let a = all.split("a", 0, 0).unwrap();
        let b = all.split("b", 0, 0).unwrap();
        let groups = if all.rank() == 0 { [&a, &b] } else { [&b, &a] };
        for round in 0..20 {
            let sums =
                groups.map(|group| group.all_reduce(tensor(&[round as f32; 5000], DType::F32)));
            for sum in sums {
                assert_eq!(floats(sum.wait().unwrap()), [2.0 * round as f32; 5000]);
            }
        }
    });
}

#[test]
fn a_library_that_keeps_one_order_is_enough_for_ranks_that_share_one() {
    on_ranks(3, patient(), |all, device| {
        device.one_order.store(true, Ordering::Relaxed);
        device.late_us.store(300 * all.rank() as u64, Ordering::Relaxed);
        let (me, len) = (all.rank(), 20_000);
        let pair = all.split("pair", usize::from(me == 2), 0).unwrap();
        for round in 0..10 {
            let sum = all.all_reduce(tensor(&[1.0; 3000], DType::F32));
            // Round the ring, one message after the other, as all ranks see it.
            for from in 0..3 {
                let (to, sent) = ((from + 1) % 3, input(round, from, len));
                if me == from {
                    drop(all.send(to, round, tensor(&sent, DType::F32)));
                } else if me == to {
                    let got = all.recv(from, round, len, DType::F32).wait().unwrap();
                    same("round the ring", got, &sent, DType::F32);
                }
            }
            let part = pair.all_gather(tensor(&[me as f32; 100], DType::F32));
            assert_eq!(floats(sum.wait().unwrap()), [3.0; 3000]);
            part.wait().unwrap();
        }
    });
}

#[test]
fn operations_are_issued_in_the_order_of_the_calls() {
    // Rank 0 asks for a message and then sums; rank 1 sums first. Were the sum issued while the
    // message has not come, both would end.
    let results = on_ranks(2, impatient(), |all, _| {
        if all.rank() == 0 {
            let message = all.recv(1, 0, 10, DType::F32);
            let sum = all.all_reduce(tensor(&[1.0; 10], DType::F32)).wait();
            return sum.and_then(|_| message.wait()).map(drop);
        }
        all.all_reduce(tensor(&[1.0; 10], DType::F32)).wait()?;
        all.send(0, 0, tensor(&[1.0; 10], DType::F32)).wait()
    });
    let text = "world: recv #0 timed out after 1 s; rank 1 has not arrived";
    assert!(
        results.iter().any(|r| r.as_ref().is_err_and(|e| e.to_string() == text)),
        "{results:?}"
    );
}

#[test]
fn the_library_s_order_is_kept_between_communicators() {
    // The stand-in would not see a wrong order if it let these two pass.
    let results = on_ranks(2, impatient(), |all, device| {
        device.one_order.store(true, Ordering::Relaxed);
        let a = all.split("a", 0, 0).unwrap();
        let b = all.split("b", 0, 0).unwrap();
        let [x, y] = if all.rank() == 0 { [&a, &b] } else { [&b, &a] };
        let sums = [x, y].map(|group| group.all_reduce(tensor(&[1.0; 10], DType::F32)));
        sums.into_iter().try_for_each(|sum| sum.wait().map(drop))
    });
    assert!(results.iter().any(Result::is_err), "{results:?}");
}

#[test]
fn two_ranks_that_send_before_they_receive_do_not_lock_each_other_up() {
    // Far more than the library's pipes hold.
    let len = 300_000;
    on_ranks(2, patient(), |all, _| {
        let (me, other) = (all.rank(), 1 - all.rank());
        for tag in 0..4 {
            all.send(other, tag, tensor(&input(tag, me, len), DType::F32)).wait().unwrap();
        }
        for tag in (0..4).rev() {
            let got = all.recv(other, tag, len, DType::F32).wait().unwrap();
            same("crossing", got, &input(tag, other, len), DType::F32);
        }
    });
}

#[test]
fn messages_have_room_once_they_are_asked_for_not_before() {
    let len = 300_000;
    on_ranks(2, patient(), |all, host| {
        let rooms = || host.rooms.load(std::sync::atomic::Ordering::Relaxed);
        let sent = |tag| tensor(&input(tag, 0, len), DType::F32);
        if all.rank() == 0 {
            (0..5).for_each(|tag| all.send(1, tag, sent(tag)).wait().unwrap());
            return all.barrier().unwrap();
        }
        // The barrier's end comes after the word of all messages.
        all.barrier().unwrap();
        assert_eq!(rooms(), 0, "nothing was asked for");
        for (tag, made) in [(0, 1), (3, 4), (1, 4), (2, 4)] {
            let got = all.recv(0, tag, len, DType::F32).wait().unwrap();
            same("asked for", got, &input(tag, 0, len), DType::F32);
            assert_eq!(rooms(), made, "tag {tag}");
        }
        // The last one is never asked for: the sender ends all the same.
    });
}

#[test]
fn a_device_begins_its_work_before_its_rank_waits() {
    on_ranks(2, patient(), |all, host| {
        let starts = || host.starts.load(std::sync::atomic::Ordering::Relaxed);
        let (peer, buffer) = (1 - all.rank(), || tensor(&[1.0; 12], DType::F32));
        let sent = all.send(peer, 0, buffer());
        let (message, whole) = (all.recv(peer, 0, 12, DType::F32), all.all_gather(buffer()));
        assert_eq!(starts(), 0, "calls collect work");
        message.wait().unwrap();
        assert_eq!(starts(), 1);
        whole.wait().unwrap();
        assert_eq!(starts(), 2);
        sent.wait().unwrap();
    });
}

#[test]
fn operations_and_bytes_are_counted_as_by_the_threads_engine() {
    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
    let work = |all: &Group| {
        let buffer = || tensor(&[1.0; 12], DType::F32);
        all.all_gather(buffer()).wait().unwrap();
        all.reduce_scatter(buffer()).wait().unwrap();
        all.all_reduce(buffer()).wait().unwrap();
        all.broadcast(1, buffer()).wait().unwrap();
        all.exchange(vec![1, 2, 3]).wait().unwrap();
        all.send(1 - all.rank(), 0, buffer()).wait().unwrap();
        all.recv(1 - all.rank(), 0, 12, DType::F32).wait().unwrap();
        zeropp_comm::CommStats { fresh_buffers: 0, early_bytes: 0, idle_bytes: 0, ..all.stats() }
    };
    let counted = on_ranks(2, patient(), |all, _| work(&all));
    let threads = ThreadsWorld::new(2, ThreadsOptions::default()).communicators();
    let expected: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = threads.into_iter().map(|r| scope.spawn(move || work(&r))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(counted, expected);
}

/// One step of a program that all ranks run.
#[derive(Clone, Debug)]
enum Step {
    Collective(usize, usize),
    /// Collectives that are one call.
    Together(Vec<(usize, usize)>),
    /// From, to, tag, length.
    Message(usize, usize, u64, usize),
    Exchange(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let collective = || (0usize..4, 0usize..3000).prop_map(|(kind, len)| (kind, len / 500 * 1500));
    let step = prop_oneof![
        (0usize..4, 0usize..3000).prop_map(|(kind, len)| Step::Collective(kind, len * 3)),
        proptest::collection::vec(collective(), 1..5).prop_map(Step::Together),
        (0usize..3, 0usize..3, 0u64..3, 0usize..9000)
            .prop_map(|(from, to, tag, len)| Step::Message(from, to, tag, len)),
        (0usize..2000).prop_map(Step::Exchange),
    ];
    proptest::collection::vec(step, 1..30)
}

type Check = Box<dyn FnOnce()>;

/// Issues collective number `i`; what waits for it and checks it.
fn collective(all: &Group, i: usize, kind: usize, len: usize) -> Check {
    let of = move |r: usize| input(i as u64, r, len);
    let me = all.rank();
    let mine = tensor(&of(me), DType::F32);
    let pending = match kind {
        0 => all.all_gather(mine),
        1 => all.reduce_scatter(mine),
        2 => all.all_reduce(mine),
        _ => all.broadcast(i % 3, mine),
    };
    Box::new(move || {
        let got = pending.wait().unwrap();
        let inputs: Vec<Vec<f32>> = (0..3).map(of).collect();
        match kind {
            0 => same("all_gather", got, &inputs.concat(), DType::F32),
            1 => {
                let part = me * len / 3..(me + 1) * len / 3;
                sum("reduce_scatter", got, &inputs, part, DType::F32);
            }
            2 => sum("all_reduce", got, &inputs, 0..len, DType::F32),
            _ => same("broadcast", got, &inputs[i % 3], DType::F32),
        }
    })
}

/// Issues everything, then waits in an order of the rank's own.
fn run(all: &Group, steps: &[Step], order: u64) {
    let me = all.rank();
    let mut waits: Vec<Check> = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        let of = move |r: usize, len: usize| input(i as u64, r, len);
        match *step {
            Step::Collective(kind, len) => waits.push(collective(all, i, kind, len)),
            Step::Together(ref several) => {
                all.together(several.len());
                let each = several.iter().map(|(kind, len)| collective(all, i, *kind, *len));
                waits.extend(each);
            }
            Step::Message(from, to, tag, len) => {
                if from == me {
                    let sent = all.send(to, tag, tensor(&of(from, len), DType::F32));
                    waits.push(Box::new(move || sent.wait().unwrap()));
                }
                if to == me {
                    let pending = all.recv(from, tag, len, DType::F32);
                    waits.push(Box::new(move || {
                        same("message", pending.wait().unwrap(), &of(from, len), DType::F32);
                    }));
                }
            }
            Step::Exchange(len) => {
                let pending = all.exchange(vec![me as u8; len * me]);
                waits.push(Box::new(move || {
                    let want: Vec<_> = (0..3).map(|r| vec![r as u8; len * r]).collect();
                    assert_eq!(*pending.wait().unwrap(), want);
                }));
            }
        }
    }
    let mut order = order.wrapping_add(me as u64);
    while !waits.is_empty() {
        order = order.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        let next = (order >> 33) as usize % waits.len();
        waits.swap_remove(next)();
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 12,
        ..Default::default()
    })]

    #[test]
    fn any_program_gives_what_it_should(steps in steps(), order: u64, late in 0u64..400) {
        on_ranks(3, patient(), |all, device| {
            device.late_us.store(late, Ordering::Relaxed);
            run(&all, &steps, order);
        });
    }
}

#[test]
fn collectives_that_belong_together_are_one_call() {
    let (size, n) = (5, 7);
    let calls = || Pretend::get().calls(size);
    let before = calls();
    on_ranks(size, patient(), |all, device| {
        device.late_us.store(100, Ordering::Relaxed);
        for round in 0..2 {
            all.together(n);
            let parts: Vec<_> = (0..n)
                .map(|i| all.all_gather(tensor(&input(round, i + all.rank(), 30 * i), DType::F32)))
                .collect();
            for (i, part) in parts.into_iter().enumerate() {
                let whole: Vec<Vec<f32>> =
                    (0..size).map(|rank| input(round, i + rank, 30 * i)).collect();
                same("together", part.wait().unwrap(), &whole.concat(), DType::F32);
            }
            // What follows is a call of its own.
            let sum = all.all_reduce(tensor(&[1.0], DType::F32)).wait().unwrap();
            same("alone", sum, &[size as f32], DType::F32);
        }
    });
    assert_eq!((calls() - before) as usize, size * 4);
}

#[test]
fn a_pipeline_message_takes_few_of_a_gpu_s_multiprocessors() {
    // Its receive waits on the GPU for the sender, beside the computing that it is to be hidden by.
    on_ranks(3, patient(), |group, _| {
        let (me, size) = (group.rank(), group.size());
        group.all_gather(tensor(&[1.0], DType::F32)).wait().unwrap();
        let sent = group.send((me + 1) % size, 7, tensor(&[2.0], DType::F32));
        group.recv((me + size - 1) % size, 7, 1, DType::F32).wait().unwrap();
        drop(sent);
    });
    // Two ranks have a communicator for their messages only; three share one for sums and gathers.
    assert_eq!(Pretend::get().ctas_max(3), c_int::MIN, "NCCL's own");
    assert_eq!(Pretend::get().ctas_max(2), 4);
}
