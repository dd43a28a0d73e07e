use proptest::prelude::*;

use super::super::garbled::{changes, garbled};
use super::*;

const MOST: u64 = 300;

/// A response with its body in one piece or in several, and the body.
fn responses() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    (
        prop::collection::vec(any::<u8>(), 0..MOST as usize),
        any::<Option<u8>>(),
    )
        .prop_map(|(body, piece)| {
            let mut bytes = b"HTTP/1.1 200 OK\r\nServer: x\r\n".to_vec();
            match piece {
                None => {
                    bytes.extend(format!("Content-Length: {}\r\n\r\n", body.len()).into_bytes());
                    bytes.extend(&body);
                }
                Some(size) => {
                    bytes.extend(b"Transfer-Encoding: chunked\r\n\r\n");
                    for part in body.chunks(1 + usize::from(size)) {
                        bytes.extend(format!("{:x}\r\n", part.len()).into_bytes());
                        bytes.extend(part);
                        bytes.extend(b"\r\n");
                    }
                    bytes.extend(b"0\r\n\r\n");
                }
            }
            (bytes, body)
        })
}

fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut wire = Wire::that_says(bytes);
    let response = response(&mut wire, "GET")?;
    body(&mut wire, &response, MOST)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The body is what the server sent, however it was cut.
    #[test]
    fn whole_responses_are_understood((bytes, body) in responses()) {
        prop_assert_eq!(read(&bytes).unwrap(), body);
    }

    /// With some bytes changed, left out or doubled they end in a body of a length that is allowed, or in an error.
    #[test]
    fn broken_responses_end((said, _) in responses(), changes in changes()) {
        let bytes = garbled(said, changes, b"\r\n:; 0f9HT/-");
        if let Ok(body) = read(&bytes) {
            prop_assert!(body.len() as u64 <= MOST);
        }
    }
}

/// Lengths beyond what the request has are refused before anything of the body is kept.
#[test]
fn longer_bodies_than_asked_for_are_refused() {
    for head in [
        "Content-Length: 301\r\n\r\n",
        "Content-Length: 18446744073709551615\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n12d\r\n",
        "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    ] {
        let error = read(format!("HTTP/1.1 200 OK\r\n{head}").as_bytes()).unwrap_err();
        assert!(
            error.to_string().contains("longer body"),
            "{head:?}: {error}"
        );
    }
}
