//! A zstd file as it is read: all of its frames, one after another.

use std::io::{BufRead, Error, ErrorKind, Read, Result};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The largest window that a frame may ask for, `zstd --long=31`: as much memory, where its content
/// is that long.
const WINDOW_BYTES_MAX: u64 = 2 << 30;

/// Decodes while it is read.
pub(crate) struct Zst<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> Zst<R> {
    pub(crate) fn new(source: R) -> Zst<R> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_BYTES_MAX);
        Zst { source, decoder, in_frame: false }
    }

    /// Begins the next frame; false where there is none.
    fn next_frame(&mut self) -> Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped =
                        std::io::copy(&mut (&mut self.source).take(length), &mut std::io::sink())?;
                    if skipped < length {
                        return Err(damaged("a frame to skip is cut"));
                    }
                }
                Err(FrameDecoderError::WindowSizeTooBig { requested, max }) => {
                    return Err(Error::other(format!(
                        "it asks for a window of {requested} bytes, and {max} are the most that \
                         are held; compress it again without --long"
                    )));
                }
                Err(e) => return Err(damaged(e)),
            }
        }
        Ok(false)
    }

    /// Compares what a frame says of its content with the content.
    fn end_frame(&mut self) -> Result<()> {
        let reported = self.decoder.get_checksum_from_data();
        if reported.is_some_and(|reported| self.decoder.get_calculated_checksum() != Some(reported))
        {
            return Err(damaged("a checksum does not match"));
        }
        self.in_frame = false;
        Ok(())
    }
}

impl<R: BufRead> Read for Zst<R> {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        loop {
            if !self.in_frame {
                if !self.next_frame()? {
                    return Ok(0);
                }
                self.in_frame = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one).map_err(damaged)?;
            }
            let n = self.decoder.read(out)?;
            if n > 0 || out.is_empty() {
                return Ok(n);
            }
            self.end_frame()?;
        }
    }
}

fn damaged(problem: impl ToString) -> Error {
    Error::new(ErrorKind::InvalidData, format!("not whole zstd: {}", problem.to_string()))
}
