//! Settings that are one of a few words.

/// Defines an enum that is spelled the same in a file, in a flag and in a message.
///
/// Crates that use it depend on serde.
#[macro_export]
macro_rules! choice {
    (
        $(#[doc = $doc:literal])+
        $name:ident { $($(#[doc = $vdoc:literal])+ $variant:ident = $word:literal,)+ }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[doc = $vdoc])+ #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// All values, in the order of [`Self::NAMES`].
            pub const ALL: &'static [$name] = &[$($name::$variant),+];
            /// How they are spelled.
            pub const NAMES: &'static [&'static str] = &[$($word),+];

            /// The spelling in files and flags.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

choice! {
    /// How data becomes token ids.
    Tokenizer {
        /// Every byte is a token: 256 ids and nothing to prepare.
        Bytes = "bytes",
        /// The file holds token ids already: 16-bit little-endian numbers, as nanoGPT (no header)
        /// and llm.c (its header is recognised) write them.
        U16 = "u16",
        /// The same with 32-bit numbers, for vocabularies above 65,536; llm.c's Llama 3 files too.
        U32 = "u32",
    }
}

choice! {
    /// Which part of the data a sample is.
    Order {
        /// A place drawn anew for every sample, from seed, step and sample index alone.
        Random = "random",
        /// Sample n of the run starts at token n·seq, and at the end the data begins again.
        Sequential = "sequential",
        /// Every part of the data once, in a random order, before any comes again in another.
        Epochs = "epochs",
    }
}
