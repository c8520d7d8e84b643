//! fp32 words that a rank has from step to step: a tensor, or a place in its file.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use zeropp_comm::{CommResult, InFlight, Pending};
use zeropp_core::cpu_tensor::{self, from_vec, on_cpu};
use zeropp_core::device;
use zeropp_core::files::ScratchCopy;
use zeropp_core::optimizer::Out;

use crate::state_file::{AwayWords, Floats, StateFile, StatePlace, failed};
use crate::under_way::Due;

/// The words. A clone is the same ones.
#[derive(Clone)]
pub(crate) enum Words {
    Here(Tensor<1>),
    Out(Arc<StatePlace>),
    /// That go out whole, where a device copies by its own queues.
    Away(Arc<AwayWords>),
    /// That an update under way gives.
    Due(Due),
}

impl Words {
    /// `t`, in `file` where there is one; of nothing there is no place.
    pub(crate) fn new(t: Tensor<1>, file: Option<&Arc<StateFile>>) -> Words {
        let n = t.dims()[0];
        let Some(file) = file.filter(|_| n > 0) else { return Words::Here(t) };
        if file.is_host {
            return Words::Away(file.away(t));
        }
        let place = file.place(n);
        file.write(vec![(place.part(0..n), cpu_tensor::into_vec(t))]);
        // What it was is memory until then.
        file.settle();
        Words::Out(place)
    }

    /// `n` zeros.
    pub(crate) fn zeros(n: usize, device: &Device, file: Option<&Arc<StateFile>>) -> Words {
        match file.filter(|_| n > 0) {
            Some(file) if !file.is_host => Words::Out(file.zeros(n)),
            file => Words::new(Tensor::zeros([n], device), file),
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        match self {
            Words::Here(t) => t.dims()[0],
            Words::Out(place) => place.words(),
            Words::Away(words) => words.words(),
            Words::Due(due) => due.words,
        }
    }

    /// Where they are computed with.
    pub(crate) fn device(&self) -> Device {
        match self {
            Words::Here(t) => t.device(),
            Words::Due(due) => due.device.clone(),
            Words::Away(words) => words.device().clone(),
            Words::Out(_) => Device::flex(),
        }
    }

    /// The tensor, where they are in memory, or will be: that is waited for.
    pub(crate) fn here(&self) -> Option<&Tensor<1>> {
        match self {
            Words::Here(t) => Some(t),
            Words::Due(due) => Some(due.wait()),
            Words::Out(_) | Words::Away(_) => None,
        }
    }

    /// Their place, where they are in a file.
    pub(crate) fn out(&self) -> Option<&Arc<StatePlace>> {
        match self {
            Words::Here(_) | Words::Away(_) | Words::Due(_) => None,
            Words::Out(place) => Some(place),
        }
    }

    /// The file or the memory that they are in.
    pub(crate) fn file(&self) -> Option<&Arc<StateFile>> {
        match self {
            Words::Here(_) | Words::Due(_) => None,
            Words::Away(words) => Some(words.file()),
            Words::Out(place) => Some(place.file()),
        }
    }

    /// All of them; a copy of what is in a file.
    pub(crate) fn tensor(&self) -> Tensor<1> {
        self.start_read(0..self.len()).wait()
    }

    /// The same, and a place is given up.
    pub(crate) fn into_tensor(self) -> Tensor<1> {
        match self {
            Words::Here(t) => t,
            Words::Due(due) => due.into_tensor(),
            out => out.tensor(),
        }
    }

    /// The same for another thread.
    pub(crate) fn handed_over(&self) -> Words {
        match self {
            Words::Out(_) | Words::Away(_) => self.clone(),
            here => Words::Here(device::hand_over(here.tensor())),
        }
    }

    /// Starts reading some of them for an update, all of those that go out whole: these are put
    /// there again after it.
    pub(crate) fn start_use(&self, range: Range<usize>) -> Reading {
        let Words::Away(words) = self else { return self.start_read(range) };
        words.start_in();
        Reading::Away(words.clone())
    }

    /// Starts reading some of them; of those that go out whole into memory of the CPU.
    pub(crate) fn start_read(&self, range: Range<usize>) -> Reading {
        match self {
            Words::Away(words) => {
                let n = range.len();
                Reading::Here(from_vec(words.read(range), [n]))
            }
            Words::Here(_) | Words::Due(_) => {
                let all = self.here().expect("here").clone();
                let is_all = range.len() == all.dims()[0];
                Reading::Here(if is_all { all } else { all.slice([range]) })
            }
            Words::Out(place) => {
                Reading::Out { copy: place.start_read(range.clone()), of: place.clone(), range }
            }
        }
    }

    /// A copy of some of them, where they are.
    pub(crate) fn copied(&self, range: Range<usize>) -> Words {
        match self {
            Words::Away(_) => Words::Here(self.start_read(range).wait()),
            Words::Here(_) | Words::Due(_) => {
                let all = self.here().expect("here");
                // There are no empty slices.
                let all = all.clone();
                Words::Here(own_copy(&if range.is_empty() { all } else { all.slice([range]) }))
            }
            Words::Out(place) => {
                let copy = place.file().place(range.len());
                each_piece(&[(self, range.start)], range.len(), |piece, mut values| {
                    let values = cpu_tensor::into_vec(values.remove(0));
                    place.file().write(vec![(copy.part(piece), values)]);
                });
                place.file().settle();
                Words::Out(copy)
            }
        }
    }
}

/// Words on their way into memory.
pub(crate) enum Reading {
    Here(Tensor<1>),
    Out { copy: ScratchCopy<Vec<Floats>>, of: Arc<StatePlace>, range: Range<usize> },
    Away(Arc<AwayWords>),
}

impl Reading {
    /// Waits for them. Where they cannot be read there are zeros, and their file says so when it is
    /// asked.
    pub(crate) fn wait(self) -> Tensor<1> {
        match self {
            Reading::Here(t) => t,
            Reading::Away(words) => words.finish_in(),
            Reading::Out { copy, of, range } => match copy.wait() {
                Ok(values) => tensor(values),
                Err(e) => {
                    of.file().note(&e);
                    from_vec(vec![0.0; range.len()], [range.len()])
                }
            },
        }
    }

    /// The same as an operation under way.
    pub(crate) fn pending(self) -> Pending<Tensor<1>> {
        match self {
            Reading::Here(t) => Pending::ready(Ok(t)),
            Reading::Out { copy, .. } => Pending::in_flight(Box::new(ReadingAlone(copy))),
            away @ Reading::Away(_) => Pending::ready(Ok(away.wait())),
        }
    }
}

struct ReadingAlone(ScratchCopy<Vec<Floats>>);

impl InFlight<Tensor<1>> for ReadingAlone {
    fn is_done(&mut self) -> bool {
        self.0.is_done()
    }

    fn wait(self: Box<Self>) -> CommResult<Tensor<1>> {
        self.0.wait().map(tensor).map_err(|e| failed(&e))
    }
}

fn tensor(mut values: Vec<Floats>) -> Tensor<1> {
    let Floats(values) = values.pop().expect("one is read");
    let n = values.len();
    from_vec(values, [n])
}

/// Some of the words of a tensor that is out.
pub(crate) struct PartOut {
    pub(crate) words: Words,
    pub(crate) range: Range<usize>,
}

/// What an update has made of them.
pub(crate) struct Written {
    pub(crate) part: PartOut,
    pub(crate) values: Tensor<1>,
}

/// Starts writing what an update has made, once what was written before is there.
pub(crate) fn put(file: &StateFile, all: Vec<Written>) {
    let mut places = Vec::new();
    if file.is_host {
        file.settle();
    }
    for Written { part, values } in all {
        match part.words {
            Words::Out(place) => {
                places.push((place.part(part.range), cpu_tensor::into_vec(values)));
            }
            Words::Away(words) => file.leave(words, values),
            Words::Here(_) | Words::Due(_) => unreachable!("what is kept is out"),
        }
    }
    if !file.is_host {
        file.write(places);
    }
}

/// Calls `f` with `n` words of each source from a place in it on, a piece of all after the other;
/// the next piece is read meanwhile. The last is there alone.
pub(crate) fn each_piece(
    sources: &[(&Words, usize)],
    n: usize,
    mut f: impl FnMut(Range<usize>, Vec<Tensor<1>>),
) {
    let pieces = pieces(n, Out::PIECE);
    let start = |piece: &Range<usize>| -> Vec<Reading> {
        let of = |(words, at): &(&Words, usize)| words.start_read(at + piece.start..at + piece.end);
        sources.iter().map(of).collect()
    };
    let mut next = pieces.first().map(start);
    for (i, piece) in pieces.iter().enumerate() {
        let reading = next.take().expect("started");
        next = pieces.get(i + 1).map(start);
        f(piece.clone(), reading.into_iter().map(Reading::wait).collect());
    }
}

/// `t` in memory that nothing else holds, also on the CPU.
pub(crate) fn own_copy(t: &Tensor<1>) -> Tensor<1> {
    match on_cpu(t) {
        Some(values) => from_vec(values.as_slice().to_vec(), t.dims()),
        None => device::copy(t),
    }
}

/// `0..n` in ranges of `piece`, the last as long as is left.
pub(crate) fn pieces(n: usize, piece: usize) -> Vec<Range<usize>> {
    (0..n).step_by(piece.max(1)).map(|start| start..(start + piece).min(n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_core::meter::Meter;
    use zeropp_core::split::AwayPlace;

    /// What goes out comes back; places count until nobody has them, and are used again.
    #[test]
    fn words_out_of_memory_are_those_that_were_here() {
        let meter = Meter::new();
        let file = StateFile::open(&std::env::temp_dir(), Out::All, &meter).unwrap();
        let n = Out::PIECE + 300;
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let here = Words::Here(from_vec(values.clone(), [n]));
        let words = Words::new(from_vec(values.clone(), [n]), Some(&file));
        let zeros = Words::zeros(n, &Device::flex(), Some(&file));
        assert_eq!(meter.now().host_state, 2 * 4 * n as u64);
        assert_eq!((meter.now().total(), words.len()), (0, n));
        let all = |words: &Words| cpu_tensor::into_vec(words.tensor());
        assert_eq!(all(&words), values);
        assert!(all(&zeros).iter().all(|x| *x == 0.0));
        let of = 100..n - 50;
        for copy in [words.copied(of.clone()), here.copied(of.clone())] {
            assert_eq!(all(&copy), values[of.clone()]);
        }
        let mut sums = Vec::new();
        each_piece(&[(&words, 7), (&here, 0)], n - 7, |piece, both| {
            let [a, b] = [&both[0], &both[1]].map(|t| cpu_tensor::into_vec(t.clone()));
            assert_eq!((a.len(), a[0] - b[0]), (piece.len(), 7.0));
            sums.push(piece.len());
        });
        assert_eq!(sums, [Out::PIECE, 293]);
        drop((words, zeros));
        assert_eq!(meter.now().host_state, 0);
        file.check().unwrap();
    }

    /// Those that go out whole are read where they are, and are others after an update.
    #[test]
    fn words_on_a_host_come_in_whole_and_go_out_again() {
        let (meter, n) = (Meter::new(), 300);
        let place = AwayPlace::file(&std::env::temp_dir()).unwrap();
        let file = StateFile::on_host(place, Out::Moments, &meter);
        let words = Words::zeros(n, &Device::flex(), Some(&file));
        assert_eq!((meter.now().host_state, words.len()), (4 * n as u64, n));
        let before = cpu_tensor::into_vec(words.start_use(0..n).wait());
        let values: Vec<f32> = before.iter().zip(0..).map(|(x, i)| x + i as f32).collect();
        let part = PartOut { words: words.clone(), range: 0..n };
        put(&file, vec![Written { part, values: from_vec(values.clone(), [n]) }]);
        for words in [words.handed_over(), words.copied(0..n)] {
            assert_eq!(cpu_tensor::into_vec(words.start_read(7..90).wait()), values[7..90]);
        }
        file.settle();
        assert_eq!(cpu_tensor::into_vec(words.into_tensor()), values);
        assert_eq!(meter.now().host_state, 0);
        file.check().unwrap();
    }

    #[test]
    fn a_fault_of_the_file_is_told_when_it_is_asked() {
        let meter = Meter::new();
        let file = StateFile::open(&std::env::temp_dir(), Out::All, &meter).unwrap();
        // Nothing has been written there.
        let words = Words::Out(file.place(9));
        assert_eq!(cpu_tensor::into_vec(words.tensor()), [0.0; 9]);
        let told = file.check().unwrap_err().to_string();
        assert!(told.starts_with("optimizer:out error") && told.contains("more room"), "{told}");
        assert!(words.start_read(0..9).pending().wait().is_err());
    }
}
