//! Which instructions the bf16 products use: the best that this CPU has, or those asked for.

use std::cell::Cell;
use std::sync::OnceLock;

/// The environment variable that asks for a path by name.
const VARIABLE: &str = "ZEROPP_ISA";

/// A way to compute the products. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Intel's matrix tiles, from Sapphire Rapids on.
    Amx,
    /// Vectors of 16 pairs of bf16 numbers, whose products are added one after the other.
    Avx512Bf16,
    /// Vectors of 16 fp32 numbers.
    Avx512,
    /// Vectors of 8 fp32 numbers with fused multiply-add.
    Avx2,
    /// Plain arithmetic, for every CPU: slow.
    Scalar,
}

/// All paths, best first; [`available`] exchanges two of them where pairs are slow.
const ALL: [Isa; 5] = [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Scalar];

impl Isa {
    /// The name that `ZEROPP_ISA` knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512Bf16 => "avx512_bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Scalar => "scalar",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_here(self) -> bool {
        match self {
            Isa::Amx => Isa::Avx512.is_here() && super::amx::is_permitted(),
            Isa::Avx512Bf16 => Isa::Avx512.is_here() && super::dots::keep_the_order(),
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
            }
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Scalar => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_here(self) -> bool {
        self == Isa::Scalar
    }
}

/// Whether a product of vectors of pairs takes as long as one of fp32 numbers: on AMD's CPUs, of
/// which Zen 4 and later have it. On Intel's Sapphire Rapids it takes twice as long, so that
/// nothing is won.
#[cfg(target_arch = "x86_64")]
fn pairs_are_fast() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes) == [*b"Auth", *b"enti", *b"cAMD"]
}

#[cfg(not(target_arch = "x86_64"))]
fn pairs_are_fast() -> bool {
    false
}

/// The paths that this machine has, best first.
pub fn available() -> &'static [Isa] {
    static FOUND: OnceLock<Vec<Isa>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let mut found: Vec<_> = ALL.into_iter().filter(|isa| isa.is_here()).collect();
        if let Some(pairs) = found.iter().position(|isa| *isa == Isa::Avx512Bf16)
            && !pairs_are_fast()
        {
            found.swap(pairs, pairs + 1);
        }
        found
    })
}

/// A value of `ZEROPP_ISA` that names no path, or one that this machine does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// The variable.
    pub variable: &'static str,
    /// Its value.
    pub value: String,
    /// The problem with it.
    pub problem: &'static str,
    /// Advice: what would work.
    pub help: String,
}

/// The path that `ZEROPP_ISA` asks for, or the best one where it is not set.
///
/// # Errors
/// Says what is wrong with the variable's value: no such path, or not on this machine.
pub fn requested() -> Result<Isa, Unavailable> {
    match std::env::var_os(VARIABLE) {
        Some(name) => parse(&name.to_string_lossy()),
        None => Ok(available()[0]),
    }
}

fn parse(name: &str) -> Result<Isa, Unavailable> {
    let refused = |problem, paths: &[Isa]| {
        let names: Vec<_> = paths.iter().map(|isa| isa.name()).collect();
        let help = format!("choose one of {}, or leave it unset", names.join(", "));
        Unavailable { variable: VARIABLE, value: name.to_string(), problem, help }
    };
    match ALL.into_iter().find(|isa| isa.name() == name) {
        None => Err(refused("no path of the bf16 kernels has this name", &ALL)),
        Some(isa) if available().contains(&isa) => Ok(isa),
        Some(_) => Err(refused("this machine does not have this path", available())),
    }
}

thread_local! {
    static FORCED: Cell<Option<Isa>> = const { Cell::new(None) };
}

/// Makes the products of this thread take a path, which must be one of [`available`]. For tests.
///
/// # Panics
/// Panics if this machine does not have it.
#[doc(hidden)]
pub fn force(isa: Option<Isa>) {
    assert!(isa.is_none_or(|isa| available().contains(&isa)), "{isa:?} is not available");
    FORCED.set(isa);
}

/// The path that this thread's products take.
///
/// # Panics
/// Panics with [`requested`]'s error: code that starts a run asks for it first.
pub fn in_use() -> Isa {
    static CHOSEN: OnceLock<Isa> = OnceLock::new();
    FORCED.get().unwrap_or_else(|| {
        *CHOSEN.get_or_init(|| requested().expect("checked before a run starts"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_by_name_and_refused_in_words() {
        assert_eq!(parse("scalar"), Ok(Isa::Scalar));
        let unknown = parse("AVX").unwrap_err();
        assert_eq!(unknown.problem, "no path of the bf16 kernels has this name");
        assert_eq!(
            unknown.help,
            "choose one of amx, avx512_bf16, avx512, avx2, scalar, or leave it unset"
        );
        for isa in ALL {
            match parse(isa.name()) {
                Ok(found) => assert!(found == isa && available().contains(&isa)),
                Err(refused) => {
                    let names = refused.help.trim_start_matches("choose one of ");
                    assert!(names.split(", ").all(|name| name != isa.name()), "{refused:?}");
                }
            }
        }
    }
}
