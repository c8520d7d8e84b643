//! A row of the table of settings, and the code that all rows expand to.

use super::kind::OptionKind;
use super::roles::{Across, OnResume};

/// One setting as its users see it.
#[derive(Clone, Copy, Debug)]
pub struct OptionInfo {
    /// The key in a file; the flag is `--key`.
    pub key: &'static str,
    /// The heading of the manual it stands under.
    pub heading: &'static str,
    /// The name of its value in the manual.
    pub value_name: &'static str,
    /// The kind of values that it takes.
    pub kind: OptionKind,
    /// The part of it that the processes of a job must share.
    pub across: Across,
    /// How a resumed run treats a change.
    pub on_resume: OnResume,
    /// Whether it says what a model is, or what its tokens are: code that uses a checkpoint's
    /// weights takes these from it.
    pub of_model: bool,
    /// The setting that it is a value of, and its name there, as in `optimizer:beta2`; none for a
    /// setting of its own. Flag and key of a value are older spellings, which the manual leaves
    /// out.
    pub part_of: Option<&'static str>,
    /// Its documentation, a line of source each, with the leading blank.
    pub doc: &'static [&'static str],
}

/// Makes the struct, its defaults and the list of all settings of their rows.
macro_rules! options {
    ($($heading:literal { $(
        $(#[doc = $doc:literal])+
        $key:literal $value_name:literal
        $field:ident: $type:ty = $default:expr, $across:ident $on_resume:ident $($of_model:ident)?
            $(=> $part_of:literal)?;
    )+ })+) => {
        /// Everything about a run.
        ///
        /// In a TOML file the keys are those of the command's flags (`micro-batches = 16`), flat,
        /// in any order; what is left out has its default. Fields that are `None` by default
        /// follow from others: read them through the method of the same name
        /// ([`unit`](Config::unit), [`micro_batches`](Config::micro_batches) and so on).
        ///
        /// ```
        /// use zeropp::Config;
        ///
        /// let config = Config { pp: 4, zero3: 8, unit: Some(8), ..Config::default() };
        /// assert_eq!((config.virtual_stages(), config.micro_batches()), (2, 16));
        /// assert_eq!(config, Config::from_toml("pp = 4\nzero3 = 8\nunit = 8")?);
        /// # Ok::<(), zeropp::config::ConfigError>(())
        /// ```
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Config {
            $($(
                $(#[doc = $doc])+
                #[serde(rename = $key, skip_serializing_if = "OptionType::unset")]
                pub $field: $type,
            )+)+
            /// The file that the settings were read from, which the run must not write. No setting.
            #[serde(skip)]
            pub file: Option<PathBuf>,
            /// Whether the run has costs in place of a model, and so no layers, though no file of
            /// `emulate` names them. No setting.
            #[serde(skip)]
            pub without_model: bool,
            /// The part of the data that a validation loss is of where no `eval-data` is named, if
            /// it is not the one that `split` keeps for it. No setting.
            #[serde(skip)]
            pub eval_part: Option<SplitPart>,
            /// How many micro-batches of an uneven batch go to a replica at a time, where a
            /// checkpoint says it. No setting.
            #[serde(skip)]
            pub dealt_by: Option<usize>,
            /// Whether programs are exchanged whatever they are predicted to gain, and whenever
            /// there is another: for tests. No setting.
            #[serde(skip)]
            pub exchanges_always: bool,
            /// Whether programs have one order of operations whatever the engine is: for tests over
            /// a library that stands in for NCCL. No setting.
            #[serde(skip)]
            pub one_order_always: bool,
        }

        impl Default for Config {
            fn default() -> Self {
                Self {
                    $($($field: $default,)+)+
                    file: None,
                    without_model: false,
                    eval_part: None,
                    dealt_by: None,
                    exchanges_always: false,
                    one_order_always: false,
                }
            }
        }

        impl Config {
            /// All settings with their values as a person would write them; none where it has none.
            /// Bytes that are no text in a path are replaced.
            pub(crate) fn texts(
                &self,
            ) -> impl Iterator<Item = (&'static OptionInfo, Option<String>)> + use<> {
                OPTIONS.iter().zip([$($(self.$field.text()),+),+])
            }
        }

        /// All settings in the order of the manual.
        pub const OPTIONS: &[OptionInfo] = &[$($(
            OptionInfo {
                key: $key,
                heading: $heading,
                value_name: $value_name,
                kind: <$type as OptionType>::KIND,
                across: Across::$across,
                on_resume: OnResume::$on_resume,
                of_model: !stringify!($($of_model)?).is_empty(),
                part_of: [$($part_of,)?].first().copied(),
                doc: &[$($doc),+],
            },
        )+)+];
    };
}
pub(super) use options;
