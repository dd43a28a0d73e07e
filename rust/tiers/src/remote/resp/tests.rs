use proptest::prelude::*;

use super::super::garbled::{changes, garbled};
use super::*;

fn text() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..40)
}

/// Replies that a server may send, arrays in arrays included.
fn replies() -> impl Strategy<Value = Reply> {
    let leaf = prop_oneof![
        text().prop_map(Reply::Text),
        any::<i64>().prop_map(Reply::Number),
        Just(Reply::Nil),
        "[A-Z]{1,8} [a-z ]{0,20}".prop_map(Reply::Error),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop::collection::vec(inner, 0..6).prop_map(Reply::Array)
    })
}

fn encoded(reply: &Reply) -> Vec<u8> {
    match reply {
        Reply::Text(text) => [
            format!("${}\r\n", text.len()).as_bytes(),
            text,
            b"\r\n".as_slice(),
        ]
        .concat(),
        Reply::Number(number) => format!(":{number}\r\n").into_bytes(),
        Reply::Nil => b"$-1\r\n".to_vec(),
        Reply::Error(error) => format!("-{error}\r\n").into_bytes(),
        Reply::Array(items) => {
            let mut out = format!("*{}\r\n", items.len()).into_bytes();
            out.extend(items.iter().flat_map(encoded));
            out
        }
    }
}

/// Bytes, characters and items that a reply keeps.
fn size(reply: &Reply) -> usize {
    match reply {
        Reply::Text(text) => text.len(),
        // A character stands for a byte at least: what is no text is replaced by a longer one.
        Reply::Error(error) => error.chars().count(),
        Reply::Array(items) => items.len() + items.iter().map(size).sum::<usize>(),
        Reply::Number(_) | Reply::Nil => 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// What a server means is what is understood, and the next reply begins behind it.
    #[test]
    fn whole_replies_are_understood(said in prop::collection::vec(replies(), 1..4)) {
        let bytes: Vec<u8> = said.iter().flat_map(encoded).collect();
        let mut wire = Wire::that_says(&bytes);
        for wanted in &said {
            prop_assert_eq!(&reply(&mut wire).unwrap(), wanted);
        }
        prop_assert!(reply(&mut wire).is_err(), "nothing more was said");
    }

    /// Replies with some bytes changed, left out or doubled end in a reply or an error, and nothing is kept that was not
    /// said.
    #[test]
    fn broken_replies_end(said in replies(), changes in changes()) {
        let bytes = garbled(encoded(&said), changes, b"*$:+-\r\n0919");
        let mut wire = Wire::that_says(&bytes);
        let mut kept = 0;
        while let Ok(reply) = reply(&mut wire) {
            kept += size(&reply);
        }
        prop_assert!(kept <= bytes.len());
    }
}

/// A server that goes on and on is left when a reply has more items or bytes than any command has, not when memory ends.
#[test]
fn endless_replies_are_refused() {
    let wide = [b"*60000\r\n".as_slice(), &b"*10000\r\n".repeat(60_000)].concat();
    let deep = b"*1\r\n".repeat(100);
    let long = [
        b"*100\r\n".as_slice(),
        &[
            b"$1048576\r\n".as_slice(),
            &vec![b'x'; BULK as usize],
            b"\r\n",
        ]
        .concat()
        .repeat(17),
    ]
    .concat();
    for (bytes, why) in [
        (wide, "more items"),
        (deep, "deeper arrays"),
        (long, "a longer reply"),
    ] {
        let error = reply(&mut Wire::that_says(&bytes)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}, not {why}");
    }
}
