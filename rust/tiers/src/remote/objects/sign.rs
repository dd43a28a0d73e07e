//! Signature Version 4, as Amazon documents it and every S3-compatible store checks it.

use std::time::{SystemTime, UNIX_EPOCH};

use ring::{digest, hmac};

use crate::remote::url::Secret;

/// Hash of a body that only TLS protects.
pub(super) const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

/// Who signs.
#[derive(Clone, Debug)]
pub(super) struct Credentials {
    pub id: String,
    pub secret: Secret,
    /// Of temporary credentials.
    pub token: Option<Secret>,
}

/// One request, as it is signed. `path` is encoded; `query` has encoded names and values, by name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unsigned<'a> {
    pub method: &'a str,
    pub host: &'a str,
    pub path: &'a str,
    pub query: &'a str,
    /// In lower case, by name, besides host, date, hash and token.
    pub range: Option<&'a str>,
    /// Hexadecimal hash of the body, or [`UNSIGNED`].
    pub hash: &'a str,
}

/// Headers of a request: host, date, hash, token, signature, each with CR LF. Without credentials nothing is signed.
pub(super) fn headers(
    request: &Unsigned<'_>,
    credentials: Option<&Credentials>,
    region: &str,
    now: SystemTime,
) -> String {
    let stamp = stamp(now);
    let mut fields = vec![("host", request.host)];
    fields.extend(request.range.map(|range| ("range", range)));
    fields.push(("x-amz-content-sha256", request.hash));
    fields.push(("x-amz-date", &stamp));
    let token = credentials.and_then(|credentials| credentials.token.as_ref());
    fields.extend(token.map(|token| ("x-amz-security-token", token.reveal())));
    let mut lines: String = fields
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    let Some(credentials) = credentials else {
        return lines;
    };
    let names = fields
        .iter()
        .map(|(name, _)| *name)
        .collect::<Vec<_>>()
        .join(";");
    let canonical: String = fields
        .iter()
        .map(|(name, value)| format!("{name}:{value}\n"))
        .collect();
    let Unsigned {
        method,
        path,
        query,
        hash,
        ..
    } = request;
    let whole = format!("{method}\n{path}\n{query}\n{canonical}\n{names}\n{hash}");
    let day = &stamp[..8];
    let scope = format!("{day}/{region}/s3/aws4_request");
    let text = format!(
        "AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{}",
        sha256(&[whole.as_bytes()])
    );
    let first = format!("AWS4{}", credentials.secret.reveal()).into_bytes();
    let key = [day, region, "s3", "aws4_request"]
        .iter()
        .fold(first, |key, part| hmac(&key, part));
    let signature = hex(&hmac(&key, &text));
    lines.push_str(&format!(
        "authorization: AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={names},Signature={signature}\r\n",
        credentials.id
    ));
    lines
}

/// Hexadecimal SHA-256 of the parts, one after the other.
pub(super) fn sha256(parts: &[&[u8]]) -> String {
    let mut context = digest::Context::new(&digest::SHA256);
    for part in parts {
        context.update(part);
    }
    hex(context.finish().as_ref())
}

fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
        .as_ref()
        .to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Everything but letters, digits and `-._~` as `%XX`, and slashes as they are if that is wanted.
pub(super) fn encoded(text: &str, slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte.into())
            }
            b'/' if slashes => out.push('/'),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// `20130524T000000Z`
fn stamp(now: SystemTime) -> String {
    let seconds = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days to a date in a calendar whose years begin in March, so that leap days come last.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "19700101T000000Z"),
            (951_782_399, "20000228T235959Z"),
            (951_782_400, "20000229T000000Z"),
            (1_369_353_600, "20130524T000000Z"),
            (1_735_689_599, "20241231T235959Z"),
        ] {
            assert_eq!(stamp(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    /// The example of Amazon's documentation for `GET` of an object.
    #[test]
    fn the_documented_signature() {
        let credentials = Credentials {
            id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: Secret::new("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
            token: None,
        };
        let request = Unsigned {
            method: "GET",
            host: "examplebucket.s3.amazonaws.com",
            path: "/test.txt",
            query: "",
            range: Some("bytes=0-9"),
            hash: &sha256(&[]),
        };
        let now = UNIX_EPOCH + Duration::from_secs(1_369_353_600);
        let lines = headers(&request, Some(&credentials), "us-east-1", now);
        assert!(
            lines.contains(
                "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
            ),
            "{lines}"
        );
        assert!(!lines.contains("wJalr"));
    }

    #[test]
    fn names_are_encoded() {
        assert_eq!(encoded("a b/ü+~.", true), "a%20b/%C3%BC%2B~.");
        assert_eq!(encoded("a/b", false), "a%2Fb");
    }
}
