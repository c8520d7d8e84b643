//! The secret that the processes of a job share.

use std::fmt;
use std::path::Path;

use zeropp_core::field_error::FieldError;
use zeropp_core::files::read_text;

/// The variable that holds the token.
pub const TOKEN_VARIABLE: &str = "ZEROPP_TOKEN";
/// Shortest token, in bytes: one that cannot be guessed from a handshake that was listened to.
const TOKEN_BYTES_MIN: usize = 16;
/// Longest token file, in bytes.
const TOKEN_BYTES_MAX: u64 = 4096;

/// A secret that all processes of a job share. It proves who belongs to the job and never leaves
/// the process.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; 32]);

impl Token {
    /// A token from its text; blanks around it do not count.
    ///
    /// # Errors
    /// The fault, in words: it is too short.
    pub fn new(text: &str) -> Result<Token, String> {
        let text = text.trim();
        if text.len() < TOKEN_BYTES_MIN {
            return Err(format!("has {} characters of the {TOKEN_BYTES_MIN} needed", text.len()));
        }
        Ok(Self(blake3::derive_key("zeropp 2026-11-21 rendezvous token", text.as_bytes())))
    }

    /// The token of this process: from `file`, or else from `variable`, the content of
    /// `ZEROPP_TOKEN`.
    ///
    /// # Errors
    /// A file that cannot be read, or that others can; a token that is too short; two that differ.
    pub fn find(
        file: Option<&Path>,
        variable: Option<String>,
    ) -> Result<Option<Token>, FieldError> {
        let help = "use the output of `openssl rand -hex 32`, the same for all nodes";
        let variable = variable.map(|text| {
            // The value itself is a secret, even a bad one.
            Token::new(&text)
                .map_err(|problem| FieldError::new(TOKEN_VARIABLE, "(hidden)", problem, help))
        });
        let variable = variable.transpose()?;
        let Some(path) = file else { return Ok(variable) };
        let error = |problem: String, help: &str| {
            FieldError::new("rendezvous:token-file", path.display(), problem, help)
        };
        let token = read(path, &error)?;
        let token = Token::new(&token).map_err(|problem| error(problem, help))?;
        if variable.is_some_and(|other| other != token) {
            let problem = format!("holds another token than {TOKEN_VARIABLE}");
            return Err(error(problem, &format!("unset {TOKEN_VARIABLE} or leave the file out")));
        }
        Ok(Some(token))
    }

    /// The key of all proofs. Without a token every process of the machine has it.
    pub(super) fn key(token: Option<&Token>) -> [u8; 32] {
        token.map_or_else(|| blake3::derive_key("zeropp 2026-11-21 no token", &[]), |t| t.0)
    }
}

fn read(path: &Path, error: &dyn Fn(String, &str) -> FieldError) -> Result<String, FieldError> {
    let unreadable = |e: std::io::Error| error(format!("cannot be read ({e})"), "name a file");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(path).map_err(unreadable)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            let problem = format!("others may read it (mode {mode:o})");
            return Err(error(problem, &format!("use chmod 600 {}", path.display())));
        }
    }
    // A secret has no place in a message, whatever is wrong with it: `read_text` quotes nothing.
    read_text(path, TOKEN_BYTES_MAX).map_err(unreadable)
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    #[test]
    #[cfg(unix)]
    fn a_token_comes_from_the_variable_or_a_private_file() {
        use std::os::unix::fs::PermissionsExt;
        let variable = |text: &str| Some(text.to_string());
        assert_eq!(Token::find(None, None).unwrap(), None);
        let token = Token::find(None, variable(SECRET)).unwrap();
        assert!(token.is_some() && !format!("{token:?}").contains(SECRET));

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let find = |variable| Token::find(Some(&path), variable);
        let refused = |variable, text: &str| {
            let error = find(variable).unwrap_err().to_string();
            assert!(error.contains(text) && !error.contains(SECRET), "{error}");
        };
        refused(None, "cannot be read");
        std::fs::write(&path, format!("{SECRET}\n")).unwrap();
        let mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        mode(0o640);
        refused(None, "others may read it (mode 640); use chmod 600 ");
        mode(0o600);
        assert_eq!(find(None).unwrap(), token);
        assert_eq!(find(variable(SECRET)).unwrap(), token);
        refused(variable("another secret of the job"), "holds another token than ZEROPP_TOKEN");
        std::fs::write(&path, "short").unwrap();
        refused(None, "has 5 characters of the 16 needed");
        std::fs::write(&path, "x".repeat(5000)).unwrap();
        refused(None, "it has more than 4096 bytes, the most that are read");
        let error = Token::find(None, variable("hunter2")).unwrap_err().to_string();
        assert!(error.contains("ZEROPP_TOKEN = (hidden): has 7 characters"), "{error}");
    }
}
