//! A parquet file as lines of JSON, one a row.

use std::fs::File;
use std::io::{BufRead, Error, Read, Result};

use parquet::errors::ParquetError;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;

/// Decodes while it is read: each row as an object with all of its columns.
pub(crate) struct TableRows {
    rows: RowIter<'static>,
    /// The row that is handed out, with its end of line.
    line: Vec<u8>,
    /// Bytes of it that are.
    taken: usize,
}

impl TableRows {
    /// Reads what the file says of itself.
    pub(crate) fn new(file: File) -> Result<TableRows> {
        let reader = SerializedFileReader::new(file).map_err(damaged)?;
        let rows = RowIter::from_file_into(Box::new(reader));
        Ok(TableRows { rows, line: Vec::new(), taken: 0 })
    }
}

impl BufRead for TableRows {
    fn fill_buf(&mut self) -> Result<&[u8]> {
        if self.taken == self.line.len()
            && let Some(row) = self.rows.next()
        {
            self.line = serde_json::to_vec(&row.map_err(damaged)?.to_json_value())?;
            self.line.push(b'\n');
            self.taken = 0;
        }
        Ok(&self.line[self.taken..])
    }

    fn consume(&mut self, n: usize) {
        self.taken += n;
    }
}

impl Read for TableRows {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        let n = self.fill_buf()?.read(out)?;
        self.consume(n);
        Ok(n)
    }
}

fn damaged(error: ParquetError) -> Error {
    Error::other(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use parquet::basic::Compression;
    use parquet::column::writer::ColumnWriter;
    use parquet::data_type::ByteArray;
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    const TEXTS: [&str; 3] = ["he said \"no\"\n", "", "ünï"];

    /// A file with a column of numbers and one of these texts, in two row groups.
    fn file(compression: Compression) -> Vec<u8> {
        let schema = "message m { required int64 id; required binary text (UTF8); }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = WriterProperties::builder().set_compression(compression).build();
        let mut bytes = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
        for group in 0..2i64 {
            let mut rows = writer.next_row_group().unwrap();
            while let Some(mut column) = rows.next_column().unwrap() {
                match column.untyped() {
                    ColumnWriter::Int64ColumnWriter(ids) => {
                        let of = [3 * group, 3 * group + 1, 3 * group + 2];
                        ids.write_batch(&of, None, None).unwrap();
                    }
                    ColumnWriter::ByteArrayColumnWriter(texts) => {
                        texts.write_batch(&TEXTS.map(ByteArray::from), None, None).unwrap();
                    }
                    _ => panic!("two columns"),
                }
                column.close().unwrap();
            }
            rows.close().unwrap();
        }
        writer.close().unwrap();
        bytes
    }

    fn read(bytes: &[u8]) -> Result<String> {
        let mut file = tempfile::tempfile()?;
        file.write_all(bytes)?;
        let mut text = String::new();
        TableRows::new(file)?.read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn rows_are_lines() {
        for compression in
            [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(Default::default())]
        {
            let text = read(&file(compression)).unwrap();
            let lines: Vec<serde_json::Value> =
                text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines.len(), 6);
            for (i, line) in lines.iter().enumerate() {
                assert_eq!(
                    (line["id"].as_u64(), line["text"].as_str()),
                    (Some(i as u64), Some(TEXTS[i % 3]))
                );
            }
        }
    }

    /// Cut anywhere a file is refused: what it says of itself is at its end.
    #[test]
    fn a_cut_file_is_an_error() {
        let whole = file(Compression::SNAPPY);
        for len in 0..whole.len() {
            assert!(read(&whole[..len]).is_err(), "{len} of {} bytes", whole.len());
        }
    }
}
