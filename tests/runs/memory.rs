//! The cut into stages and the memory that a run may take.

use crate::common::{assert_same_bits, run, tiny};
use zeropp::config::Recompute;
use zeropp::{Config, Error, Plan, RankPlan, Trainer};

fn plan(config: &Config) -> Plan {
    Trainer::new(config.clone()).unwrap().plan().clone()
}

/// The most that a rank is predicted to hold at once.
fn most(config: &Config) -> u64 {
    plan(config).ranks.iter().map(|rank| rank.held.at_once.total()).max().unwrap()
}

/// Of the ranks of 1F1B the first holds the activations of P micro-batches, the last those of one.
fn uneven() -> Config {
    Config {
        pp: 4,
        schedule: "1f1b".into(),
        layers: 16,
        micro_batches: Some(8),
        steps: 2,
        virtual_stages: Some(1),
        ..tiny()
    }
}

const GIB: f64 = (1u64 << 30) as f64;

#[test]
fn a_cut_keeps_every_rank_within_its_memory() {
    for (schedule, v) in [("1f1b", 1), ("interleaved", 2), ("zeropp", 2)] {
        let unit = (schedule == "zeropp").then_some(8);
        let free = Config {
            schedule: schedule.into(),
            virtual_stages: Some(v),
            unit,
            zero3: v,
            layers: 16 * v,
            ..uneven()
        };
        let limit = most(&free) as f64 * 0.95;
        let bounded = Config { rank_memory: Some(limit / GIB), ..free.clone() };
        let (before, after) = (plan(&free), plan(&bounded));
        assert!(most(&bounded) as f64 <= limit, "{schedule}: {} of {limit}", most(&bounded));
        assert_ne!(before.blocks, after.blocks, "{schedule}");
        assert_eq!(after.blocks.iter().sum::<usize>(), 16 * v, "{schedule}");
        // It takes longer, and changes no bit.
        assert!(after.longest_stage >= before.longest_stage, "{schedule}");
        assert_eq!(after.cut, "by FLOP within rank-memory");
        if schedule == "1f1b" {
            assert!(after.blocks[0] < before.blocks[0], "{:?}", after.blocks);
            assert_same_bits(&run(free), &run(bounded), schedule);
        }
    }
}

#[test]
fn a_cut_by_hand_is_taken_and_changes_no_bit() {
    let by_hand = Config {
        stages: Some("3,4,5,4".into()),
        virtual_stages: None,
        pp: 2,
        schedule: "zeropp".into(),
        ..uneven()
    };
    let plan = plan(&by_hand);
    assert_eq!(
        (plan.virtual_stages, plan.blocks, plan.cut.as_str()),
        (2, vec![3, 4, 5, 4], "as given")
    );
    let names: Vec<&str> = plan.ranks[0].stages[0].1.iter().map(String::as_str).collect();
    assert_eq!(names, ["wte", "wpe", "h.0", "h.1", "h.2"], "the embedding beside its blocks");
    assert!(plan.ranks[1].stages[1].1.ends_with(&["ln_f".into(), "lm_head".into()]));
    let free = Config { stages: None, virtual_stages: Some(2), ..by_hand.clone() };
    assert_same_bits(&run(by_hand), &run(free), "by hand");
}

#[test]
fn a_cut_that_is_not_of_this_model_is_refused_with_one_that_is() {
    let refused = |stages: &str| {
        let config = Config { stages: Some(stages.into()), ..uneven() };
        Trainer::new(config).err().expect(stages).to_string()
    };
    let help = "; use 4 numbers that sum to 16, such as ";
    for stages in ["4,4,4,5", "4,4,4", "18446744073709551615,1,8,8"] {
        let text = refused(stages);
        let (_, such) = text.split_once(help).expect(&text);
        let works = Config { stages: Some(such.into()), ..uneven() };
        assert_eq!(plan(&works).blocks, plan(&uneven()).blocks, "what is advised works");
    }
    for stages in ["", "4,4,four,4", "4,4,4,0,4", "4;4;4;4", "-1,5,6,6"] {
        let text = refused(stages);
        assert!(text.ends_with("the head alone); use a list such as 3,4,4,3 or 3,2x4,3"), "{text}");
    }
}

/// A last stage without a block has the final norm and the head, and is predicted like any other.
#[test]
fn a_head_alone_in_its_stage_is_predicted_and_changes_no_bit() {
    let base = Config { virtual_stages: None, pp: 2, schedule: "zeropp".into(), ..uneven() };
    let even = Config { stages: Some("3,4,5,4".into()), zero3: 2, ..base };
    let reference = run(even.clone());
    for (recompute, prefetch) in [(Recompute::None, 1), (Recompute::Full, 2)] {
        let stages = Some("5,5,6,0".into());
        let alone = Config { stages, recompute, prefetch, ..even.clone() };
        let last = plan(&alone).ranks[1].stages[1].1.clone();
        assert_eq!(last, ["ln_f", "lm_head"]);
        let trained = run(alone);
        assert_same_bits(&reference, &trained, "the head alone");
        let summary = &trained.summary;
        assert_eq!(summary.peak_bytes, summary.predicted_bytes, "{recompute}");
    }
    let tied = Config { tied: true, ..even };
    let alone = Config { stages: Some("5,5,6,0".into()), ..tied.clone() };
    assert_same_bits(&run(tied), &run(alone), "a tied head alone");
}

/// Activations are the most of what its ranks hold.
fn twelve_micro_batches() -> Config {
    Config {
        pp: 2,
        virtual_stages: Some(2),
        seq: 64,
        micro_batch_size: 4,
        micro_batches: Some(12),
        unit: Some(6),
        ..tiny()
    }
}

/// What would need too much is refused before a rank starts, with settings that do fit.
#[test]
fn a_run_that_needs_too_much_is_refused_with_what_would_fit() {
    let greedy = Config { steps: 1, warmup: None, ..twelve_micro_batches() };
    let limit = (most(&greedy) as f64 * 0.6) as u64;
    let rank_memory = Some(limit as f64 / GIB);
    let bounded = Config { rank_memory, recompute: Recompute::None, ..greedy };
    let error = Trainer::new(bounded.clone()).unwrap().train(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Memory(_)) && error.is_bad_input(), "{error}");
    let text = error.to_string();
    assert!(text.contains("The largest kind is activation"), "{text}");
    let (_, fits) = text.split_once("What would fit:\n").expect(&text);
    let fits: Vec<&str> = fits.lines().take_while(|line| line.starts_with("  --")).collect();
    assert_eq!(fits.len(), 3, "{text}");
    for line in fits {
        let mut config = bounded.clone();
        let mut words = line.split_whitespace();
        while let Some(flag) = words.next().and_then(|word| word.strip_prefix("--")) {
            let value = words.next().unwrap();
            match flag {
                "recompute" => {
                    let (word, first) = value.split_once(":first=").unwrap_or((value, ""));
                    config.recompute = recompute(word);
                    config.recompute_first = first.parse().ok();
                }
                "micro-batch-size" => config.micro_batch_size = value.parse().unwrap(),
                "micro-batches" => config.micro_batches = value.parse().ok(),
                "unit" => config.unit = value.parse().ok(),
                "virtual" => config.virtual_stages = value.parse().ok(),
                other => panic!("{other} in {line}"),
            }
        }
        let batch = |c: &Config| c.tokens_per_step();
        assert_eq!(batch(&config), batch(&bounded), "{line}: the same batch");
        assert!(most(&config) <= limit, "{line}: {} of {limit}", most(&config));
        Trainer::new(config).unwrap().train(|_| ()).expect(line);
    }
    let all_the_same = Config { no_memory_check: true, ..bounded };
    Trainer::new(all_the_same).unwrap().train(|_| ()).unwrap();
}

fn recompute(name: &str) -> Recompute {
    *Recompute::ALL.iter().find(|recompute| recompute.name() == name).unwrap()
}

/// Where a rank may have less than it would need, as little as that takes is made again: the run
/// stays within the limit, as predicted, and has the same bits.
#[test]
fn a_limit_makes_a_run_recompute_as_little_as_fits() {
    let free = Config { stages: Some("4x4".into()), steps: 2, ..twelve_micro_batches() };
    let with = |recompute, recompute_first| Config { recompute, recompute_first, ..free.clone() };
    let reference = run(free.clone());
    assert_eq!(most(&free), most(&with(Recompute::None, None)), "nothing is short");
    assert!(plan(&free).notes.iter().all(|note| !note.contains("recompute")));
    let first = |n| (Recompute::Full, Some(n));
    let classes = [(Recompute::Selective, None), first(2), first(5), (Recompute::Full, None)];
    for (recompute, n) in classes {
        let limit = most(&with(recompute, n));
        let bounded = Config { rank_memory: Some(limit as f64 / GIB), ..free.clone() };
        let shown = n.map_or(recompute.to_string(), |n| format!("{recompute}:first={n}"));
        let notes = plan(&bounded).notes;
        let said = format!("recompute = auto: {shown}, as ");
        assert!(notes.iter().any(|note| note.starts_with(&said)), "{said}: {notes:?}");
        let bounded = run(bounded);
        assert_same_bits(&reference, &bounded, &shown);
        let summary = &bounded.summary;
        assert_eq!(summary.peak_bytes, summary.predicted_bytes, "{shown}");
        assert!(summary.at_once_bytes <= limit, "{shown}: {} of {limit}", summary.at_once_bytes);
    }
    let least = most(&with(Recompute::Full, None));
    let bounded = Config { rank_memory: Some((least - 1) as f64 / GIB), ..free };
    let error = Trainer::new(bounded).unwrap().train(|_| ()).unwrap_err().to_string();
    assert!(error.contains(" even with recompute = full, and rank-memory is "), "{error}");
    let (_, fits) = error.split_once("What would fit:\n").expect(&error);
    assert!(fits.starts_with("  --micro-batch-size 2 "), "no less than that: {error}");
}

/// What a machine has is held against all ranks on it, with what they share counted once.
#[test]
fn ranks_of_a_process_are_counted_together() {
    let needed = |zero3, dp| {
        let config = Config { zero3, dp, pp: 2, virtual_stages: Some(2), ..tiny() };
        let trainer = Trainer::new(config).unwrap();
        let check = trainer.memory();
        assert_eq!(check.ranks, 2 * zero3 * dp);
        let ranks = &trainer.plan().ranks;
        let all = |rank: &RankPlan| {
            let results = rank.held.peaks.communication - rank.held.at_once.communication;
            rank.held.at_once.total() + results
        };
        let all: u64 = ranks.iter().map(all).sum();
        let gathered: u64 = ranks.iter().map(|rank| rank.held.at_once.gathered).sum();
        let groups = (zero3 * dp) as u64;
        let tensors = groups * all - (zero3 as u64 - 1) * dp as u64 * gathered;
        check.needed - tensors - tensors / 16
    };
    let of_two_ranks = needed(2, 1) - needed(1, 1);
    for (zero3, dp) in [(1, 2), (4, 2), (2, 3)] {
        let more = (zero3 * dp - 1) as u64 * of_two_ranks;
        assert_eq!(needed(zero3, dp), needed(1, 1) + more, "zero3 {zero3}, dp {dp}");
    }
    assert!(of_two_ranks > 0 && needed(1, 1) > of_two_ranks, "a process has its own, a rank too");
}

/// Sizes whose product is beyond 64 bits are refused in words; before, they wrapped around.
#[test]
fn sizes_beyond_any_machine_are_refused() {
    let refused = |config: Config| Trainer::new(config).err().expect("refused").to_string();
    let model = Config { hidden: 1 << 24, layers: 1 << 14, heads: 1, ..tiny() };
    let text = refused(model);
    assert!(text.starts_with("hidden = 16777216: with 16384 layers"), "{text}");
    assert!(text.contains("5.5e19 parameters"), "{text}");
    let batch = Config { micro_batch_size: 1 << 24, micro_batches: Some(1 << 20), ..tiny() };
    let text = refused(Config { unit: Some(1), ..batch });
    assert!(text.starts_with("micro-batch-size = 16777216: a step's activations of"), "{text}");
}
