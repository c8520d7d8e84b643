//! Reading an object's fields into a struct that has its defaults already.
//!
//! It reads what `#[derive(Deserialize)]` with `deny_unknown_fields` reads, with the same errors,
//! but no list in place of an object. The derived code keeps every field in a variable of its own,
//! which it frees at each error; that is up to 20 KB for a struct where this is 1 to 4, and the
//! page of the playground carries it along.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};

/// A struct that [`fields!`](crate::fields) lists the fields of.
pub trait Fields: Default {
    /// As errors call it.
    const STRUCT: &'static str;
    /// The keys, at most 32.
    const KEYS: &'static [&'static str];
    /// Keys that have to be there.
    const NEEDED: &'static [&'static str];

    /// Reads the value of the key of this index.
    ///
    /// # Errors
    /// A value that the field cannot have.
    fn set<'de, A: MapAccess<'de>>(&mut self, key: usize, object: &mut A) -> Result<(), A::Error>;
}

/// Reads an object.
///
/// # Errors
/// What is no object, and a key that is unknown, missing or there twice.
pub fn read<'de, T: Fields, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    from.deserialize_map(Object(PhantomData))
}

struct Object<T>(PhantomData<T>);

impl<'de, T: Fields> Visitor<'de> for Object<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "struct {}", T::STRUCT)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<T, A::Error> {
        let mut read = T::default();
        let mut seen = 0u32;
        while let Some(key) = object.next_key_seed(Key(T::KEYS))? {
            if seen & 1 << key != 0 {
                return Err(A::Error::duplicate_field(T::KEYS[key]));
            }
            seen |= 1 << key;
            read.set(key, &mut object)?;
        }
        let missing = |(i, key): &(usize, &&str)| seen & 1 << i == 0 && T::NEEDED.contains(key);
        match T::KEYS.iter().enumerate().find(missing) {
            None => Ok(read),
            Some((_, key)) => Err(A::Error::missing_field(key)),
        }
    }
}

/// The index of a key.
struct Key(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for Key {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<usize, D::Error> {
        from.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Key {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("field identifier")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<usize, E> {
        let index = self.0.iter().position(|known| *known == key);
        index.ok_or_else(|| E::unknown_field(key, self.0))
    }
}

/// Makes a struct with defaults readable from an object: its fields, with their keys where these
/// are called otherwise, and the keys that have to be there.
#[macro_export]
#[doc(hidden)]
macro_rules! fields {
    ($type:ident { $($field:ident $(= $key:literal)?),+ $(,)? } needs $needed:expr) => {
        impl $crate::fields::Fields for $type {
            const STRUCT: &'static str = stringify!($type);
            const KEYS: &'static [&'static str] = &[$($crate::fields!(@ $field $($key)?)),+];
            const NEEDED: &'static [&'static str] = &$needed;

            fn set<'de, A: serde::de::MapAccess<'de>>(
                &mut self,
                key: usize,
                object: &mut A,
            ) -> Result<(), A::Error> {
                #[allow(non_camel_case_types)]
                enum Field { $($field),+ }
                $(if key == Field::$field as usize {
                    self.$field = object.next_value()?;
                })+
                Ok(())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<$type, D::Error> {
                $crate::fields::read(from)
            }
        }
    };
    (@ $field:ident) => { stringify!($field) };
    (@ $field:ident $key:literal) => { $key };
}
