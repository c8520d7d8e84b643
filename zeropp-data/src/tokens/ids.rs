//! Files of token ids: how wide an id is, what llm.c writes before them, the largest of them.

use super::bytes::JoinedBytes;
use crate::choices::Tokenizer;

/// llm.c's header: 256 little-endian i32, {magic, version, tokens, 0…}.
const HEADER_BYTES: usize = 1024;
/// Magic number and version of llm.c's files, and what they hold: GPT-2's and Llama 3's.
const LLM_C: [(i32, i32, Tokenizer); 2] =
    [(20_240_520, 1, Tokenizer::U16), (20_240_801, 7, Tokenizer::U32)];
/// Bytes that are looked at for the kind of a file.
const PROBE_BYTES: usize = 1 << 16;

/// Bytes of one token.
pub(super) fn token_bytes(tokenizer: Tokenizer) -> usize {
    match tokenizer {
        Tokenizer::Bytes => 1,
        Tokenizer::U16 => 2,
        Tokenizer::U32 => 4,
    }
}

/// The i-th number of a header.
fn number(bytes: &JoinedBytes, i: usize) -> Option<i32> {
    let mut raw = [0; 4];
    (bytes.len() >= 4 * i + 4).then(|| {
        bytes.read(4 * i, &mut raw);
        i32::from_le_bytes(raw)
    })
}

/// Bytes before the ids of a nanoGPT or llm.c file. The first id of a headless one would have to be
/// beyond any vocabulary to be taken for a magic number.
///
/// # Errors
/// A file that is not whole, or holds ids of another width.
pub(super) fn header_bytes(bytes: &JoinedBytes, tokenizer: Tokenizer) -> Result<usize, String> {
    let first = number(bytes, 0);
    let Some((_, version, holds)) = LLM_C.into_iter().find(|known| first == Some(known.0)) else {
        let (width, len) = (token_bytes(tokenizer), bytes.len());
        return match len.is_multiple_of(width) {
            true => Ok(0),
            false => Err(format!("{len} bytes are not whole {}-bit tokens", 8 * width)),
        };
    };
    if holds != tokenizer {
        let bits = 8 * token_bytes(holds);
        return Err(format!("llm.c's header says {bits}-bit ids; use tokenizer = {holds}"));
    }
    let len = bytes.len();
    let (Some(found), Some(tokens)) = (number(bytes, 1), number(bytes, 2)) else {
        return Err(format!("{len} bytes are too short for llm.c's header of 1024"));
    };
    let bits = 8 * token_bytes(tokenizer);
    if found != version {
        let known = format!("version {version} ({bits}-bit) is read");
        return Err(format!("llm.c version {found} is unknown; {known}"));
    }
    let expected = usize::try_from(tokens).ok();
    if expected.map(|n| HEADER_BYTES + token_bytes(tokenizer) * n) != Some(len) {
        return Err(format!(
            "llm.c's header says {tokens} tokens, but the file has {len} bytes; was it truncated?"
        ));
    }
    Ok(HEADER_BYTES)
}

/// A reason in the beginning of the data against `tokenizer`, and the one that would read it.
pub(super) fn doubt(bytes: &JoinedBytes, header: usize, tokenizer: Tokenizer) -> Option<String> {
    let mut probe = vec![0; PROBE_BYTES.min(bytes.len() - header)];
    bytes.read(header, &mut probe);
    match tokenizer {
        Tokenizer::Bytes => {
            let known = LLM_C.into_iter().find(|known| number(bytes, 0) == Some(known.0));
            // Text has no zeros; ids below 256, or of 32 bits, have many.
            let zeros = probe.iter().filter(|byte| **byte == 0).count();
            let [u16s, u32s] = [2, 4].map(|width| ends_in_zero(&probe, width));
            let reader = match known {
                Some((.., tokenizer)) => tokenizer,
                None if zeros * 50 < probe.len().max(50) => return None,
                None if u32s && !u16s => Tokenizer::U32,
                None => Tokenizer::U16,
            };
            Some(format!("looks like token ids, not text; if it is, use tokenizer = {reader}"))
        }
        Tokenizer::U16 if probe.len() >= 64 && ends_in_zero_u16(&probe) => {
            let reader = Tokenizer::U32;
            Some(format!(
                "every other id is 0, as if they had 32 bits; if they do, use tokenizer = {reader}"
            ))
        }
        Tokenizer::U16 | Tokenizer::U32 => None,
    }
}

/// Whether the highest byte of every number of `width` bytes is zero.
fn ends_in_zero(probe: &[u8], width: usize) -> bool {
    probe.chunks_exact(width).all(|raw| raw[width - 1] == 0)
}

/// Whether every other 16-bit number is zero.
fn ends_in_zero_u16(probe: &[u8]) -> bool {
    probe.chunks_exact(4).all(|raw| raw[2] == 0 && raw[3] == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ids: &[u32], width: usize) -> JoinedBytes {
        JoinedBytes::in_memory(
            ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect(),
        )
    }

    #[test]
    fn other_token_formats_are_named_with_their_setting() {
        let ids: Vec<u32> = (0..1000).map(|i| i * 37 % 50_257).collect();
        let tokenizer = |bytes: &JoinedBytes, read_as| {
            let said = doubt(bytes, 0, read_as)?;
            Some(said.split("tokenizer = ").nth(1)?.to_owned())
        };
        let text = JoinedBytes::in_memory("text, ünïcode and code\n".repeat(100).into_bytes());
        let (u16s, u32s) = (of(&ids, 2), of(&ids, 4));
        assert_eq!(tokenizer(&text, Tokenizer::Bytes), None);
        assert_eq!(tokenizer(&u32s, Tokenizer::Bytes).as_deref(), Some("u32"));
        let small: Vec<u32> = ids.iter().map(|id| id % 300).collect();
        assert_eq!(tokenizer(&of(&small, 2), Tokenizer::Bytes).as_deref(), Some("u16"));
        assert_eq!(tokenizer(&u32s, Tokenizer::U16).as_deref(), Some("u32"));
        assert_eq!(tokenizer(&u16s, Tokenizer::U16), None);
        assert_eq!(tokenizer(&u32s, Tokenizer::U32), None);
        assert_eq!(tokenizer(&of(&[], 2), Tokenizer::Bytes), None);
    }
}
