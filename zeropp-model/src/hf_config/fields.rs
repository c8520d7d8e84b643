//! The fields of an object of a `config.json`: each with its type, and nothing in them unread.

use std::fmt;

use serde_json::{Map, Value};
use zeropp_data::files::excerpt;

/// Largest size in a file: products of two stay far from overflow.
const SIZE_MAX: u64 = 1 << 24;
/// Most blocks in one: a list of their parameters takes no memory to speak of.
const LAYERS_MAX: usize = 1 << 14;

/// A field and what is wrong with it.
pub(super) type Fault = (String, String);

/// The type of a field's value; null is a field that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldType {
    /// A whole number from 1.
    Size,
    /// A whole number from 0.
    Count,
    /// A number above 0.
    Number,
    /// A number from 0 to 1.
    Share,
    /// True or false.
    Switch,
    /// Text.
    Word,
    /// An object.
    Object,
    /// A list.
    List,
    /// A token id or a list of them; −1 is none.
    Ids,
    /// Anything: nothing here depends on it.
    Any,
}

/// The fields that an object may have.
pub(super) type Known<'a> = &'a [(&'a str, FieldType)];

/// The fields of an object, each with what is wrong with it.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A value that is there and not null.
    pub(super) fn get(self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    pub(super) fn fault<T>(self, field: &str, problem: impl fmt::Display) -> Result<T, Fault> {
        let problem = match self.get(field) {
            Some(value) => format!("{} {problem}", excerpt(&value.to_string())),
            None => format!("is missing: {problem}"),
        };
        Err((excerpt(field), problem))
    }

    /// Every field is in one of the lists and has the type that it says there.
    pub(super) fn check(self, lists: &[Known<'_>]) -> Result<(), Fault> {
        for (field, value) in self.0 {
            let mut known = lists.iter().flat_map(|list| list.iter());
            let Some((_, kind)) = known.find(|(name, _)| name == field) else {
                let value = excerpt(&value.to_string());
                let problem = format!(
                    "{value} is not known, and may change the model; where it does not, delete it \
                     from this file"
                );
                return Err((excerpt(field), problem));
            };
            self.check_type(field, *kind)?;
        }
        Ok(())
    }

    fn check_type(self, field: &str, kind: FieldType) -> Result<(), Fault> {
        match kind {
            FieldType::Size => self.optional_size(field).map(drop),
            FieldType::Count => self.optional_count(field, 0).map(drop),
            FieldType::Number => self.optional_number(field).map(drop),
            FieldType::Share => self.share(field).map(drop),
            FieldType::Switch => self.switch(field, false).map(drop),
            FieldType::Word => self.word(field).map(drop),
            FieldType::Object => self.object(field).map(drop),
            FieldType::List => self.list(field).map(drop),
            FieldType::Ids => self.ids(field).map(drop),
            FieldType::Any => Ok(()),
        }
    }

    pub(super) fn optional_size(self, field: &str) -> Result<Option<usize>, Fault> {
        self.optional_count(field, 1)
    }

    pub(super) fn optional_count(self, field: &str, least: u64) -> Result<Option<usize>, Fault> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().filter(|n| (least..=SIZE_MAX).contains(n)) {
            Some(n) => Ok(Some(n as usize)),
            None => self.fault(field, format!("is no whole number from {least} to {SIZE_MAX}")),
        }
    }

    pub(super) fn layers(self, field: &str) -> Result<usize, Fault> {
        match self.size(field)? {
            n if n <= LAYERS_MAX => Ok(n),
            _ => {
                self.fault(field, format!("is more than {LAYERS_MAX}, the most blocks of a model"))
            }
        }
    }

    pub(super) fn size(self, field: &str) -> Result<usize, Fault> {
        match self.optional_size(field)? {
            Some(n) => Ok(n),
            None => self.fault(field, "a whole number from 1 is needed"),
        }
    }

    pub(super) fn optional_number(self, field: &str) -> Result<Option<f64>, Fault> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
            Some(x) => Ok(Some(x)),
            None => self.fault(field, "is no number above 0"),
        }
    }

    pub(super) fn number(self, field: &str) -> Result<f64, Fault> {
        match self.optional_number(field)? {
            Some(x) => Ok(x),
            None => self.fault(field, "a number above 0 is needed"),
        }
    }

    /// A number from 0 to 1; 0 where it is not there.
    pub(super) fn share(self, field: &str) -> Result<f64, Fault> {
        let Some(value) = self.get(field) else { return Ok(0.0) };
        match value.as_f64().filter(|x| (0.0..=1.0).contains(x)) {
            Some(x) => Ok(x),
            None => self.fault(field, "is no number from 0 to 1"),
        }
    }

    pub(super) fn switch(self, field: &str, default: bool) -> Result<bool, Fault> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(on)) => Ok(*on),
            Some(_) => self.fault(field, "is neither true nor false"),
        }
    }

    pub(super) fn word(self, field: &str) -> Result<Option<&'a str>, Fault> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(word)) => Ok(Some(word)),
            Some(_) => self.fault(field, "is no text"),
        }
    }

    pub(super) fn object(self, field: &str) -> Result<Option<Fields<'a>>, Fault> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(inner)) => Ok(Some(Fields(inner))),
            Some(_) => self.fault(field, "is no object"),
        }
    }

    pub(super) fn list(self, field: &str) -> Result<Option<&'a [Value]>, Fault> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(_) => self.fault(field, "is no list"),
        }
    }

    /// Token ids; −1 is none, as early files have it.
    pub(super) fn ids(self, field: &str) -> Result<Vec<u32>, Fault> {
        let ids = match self.get(field) {
            None => return Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        let mut read = Vec::new();
        for id in ids {
            match id.as_i64().map(u32::try_from) {
                Some(Ok(id)) => read.push(id),
                Some(Err(_)) if id.as_i64() == Some(-1) => {}
                _ => return self.fault(field, "is neither a token id nor a list of them"),
            }
        }
        Ok(read)
    }

    /// Refuses a switch that is on, or off, where the other is needed.
    pub(super) fn must_be(self, field: &str, wanted: bool, why: &str) -> Result<(), Fault> {
        if self.switch(field, wanted)? == wanted { Ok(()) } else { self.fault(field, why) }
    }
}
