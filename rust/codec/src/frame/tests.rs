use super::*;
use proptest::prelude::*;

fn namespace() -> Namespace {
    Namespace::new(&[("model", b"weights")], b"salt")
}

#[derive(Debug)]
struct Made {
    header: Header,
    params: Vec<u8>,
    tokens: Vec<u32>,
    scores: Option<Vec<f32>>,
    behind: Vec<Key>,
    payload: Vec<u8>,
}

impl Made {
    fn parts(&self) -> Parts<'_> {
        Parts {
            header: self.header,
            params: &self.params,
            tokens: &self.tokens,
            scores: self.scores.as_deref(),
            behind: &self.behind,
            payload: &self.payload,
        }
    }
}

fn made(tokens: Vec<u32>, params: Vec<u8>, scores: bool, nbehind: usize, per_token: u32) -> Made {
    let namespace = namespace();
    let parent = blendstore_core::key::SEGMENT_ROOT;
    let ntokens = tokens.len() as u32;
    let header = Header {
        key: namespace.chain_key(&parent, &namespace.content_id(&tokens)),
        parent,
        namespace: namespace.name(),
        context: [7; 32],
        ntokens,
        bytes_per_token: per_token,
        source_position: 37,
        segment_offset: 512,
        behind_tokens: 900,
        format: 0,
        codec: Codec::RAW,
        provenance: 2,
        rank: 3,
    };
    Made {
        header,
        params,
        scores: scores.then(|| tokens.iter().map(|&token| token as f32 / 3.0).collect()),
        behind: (0..nbehind).map(|n| [n as u8; 32]).collect(),
        payload: (0..ntokens * per_token).map(|n| (n * 31) as u8).collect(),
        tokens,
    }
}

fn any_made() -> impl Strategy<Value = Made> {
    let tokens = proptest::collection::vec(any::<u32>(), 1..40);
    let params = proptest::collection::vec(any::<u8>(), 0..20);
    (tokens, params, any::<bool>(), 0..4usize, 1..20u32).prop_map(
        |(tokens, params, scores, nbehind, per_token)| {
            made(tokens, params, scores, nbehind, per_token)
        },
    )
}

fn assert_same(frame: &Frame<'_>, made: &Made) {
    assert_eq!(frame.head.header, made.header);
    assert_eq!(frame.head.params, made.params);
    assert_eq!(frame.head.tokens(), made.tokens);
    assert_eq!(frame.head.scores(), made.scores);
    assert_eq!(frame.head.behind(), made.behind);
    assert_eq!(frame.payload, made.payload);
}

proptest! {
    /// Every part comes back as it went in.
    #[test]
    fn a_frame_gives_back_what_it_was_made_of(made in any_made()) {
        let bytes = made.parts().encode();
        let frame = Frame::parse(&bytes).expect("a whole frame");
        assert_same(&frame, &made);
        prop_assert_eq!(frame.slices().map(|slice| slice.to_vec()).concat(), bytes.clone());
        prop_assert_eq!(frame.len(), bytes.len());
        frame.head.header.verify(&namespace(), &made.header.key, &made.tokens).expect("itself");
    }

    /// Case c03: one flipped bit anywhere is an error, never another record.
    #[test]
    fn case_c03_a_flipped_bit_is_an_error(made in any_made(), at in any::<proptest::sample::Index>(), bit in 0..8u32) {
        let mut bytes = made.parts().encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        prop_assert!(Frame::parse(&bytes).is_err());
    }

    /// Case c03: every prefix, and every frame with something behind it, is an error.
    #[test]
    fn case_c03_a_truncated_or_longer_frame_is_an_error(made in any_made(), cut in any::<proptest::sample::Index>()) {
        let mut bytes = made.parts().encode();
        prop_assert!(Frame::parse(&bytes[..cut.index(bytes.len())]).is_err());
        bytes.push(0);
        prop_assert!(Frame::parse(&bytes).is_err());
    }

    /// Case c03: bytes of anybody's are an error or a frame; so are frames with any of their numbers changed, whatever the
    /// checksum says.
    #[test]
    fn case_c03_hostile_bytes_never_panic(
        made in any_made(),
        edits in proptest::collection::vec((0..FIXED, any::<u8>()), 0..8),
        noise in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        let _ = Frame::parse(&noise);
        let mut bytes = made.parts().encode();
        for (at, value) in edits {
            bytes[at] = value;
        }
        seal(&mut bytes);
        if let Ok(frame) = Frame::parse(&bytes) {
            let head = frame.head;
            prop_assert_eq!(head.frame_len(), bytes.len() as u64);
            prop_assert_eq!(head.tokens().len(), head.header.ntokens as usize);
            let _ = (head.scores(), head.behind());
        }
    }
}

/// Sets the head's checksum to what it should be, as an attacker would.
fn seal(bytes: &mut [u8]) {
    let head_len =
        (u32::from_le_bytes(bytes[12..16].try_into().expect("four")) as usize).min(bytes.len());
    bytes[HEAD_SUM].fill(0);
    let sum = xxh3_64(&bytes[..head_len]);
    bytes[HEAD_SUM].copy_from_slice(&sum.to_le_bytes());
}

fn with(made: &Made, at: usize, value: &[u8]) -> Result<()> {
    let mut bytes = made.parts().encode();
    bytes[at..at + value.len()].copy_from_slice(value);
    seal(&mut bytes);
    Frame::parse(&bytes).map(|_| ())
}

/// Case c03: each lie about a number is told by its name, with a checksum that holds.
#[test]
fn case_c03_each_lie_has_its_name() {
    let made = made((0..8).collect(), vec![1, 2, 3], true, 2, 16);
    let value = |what, found| Err(FrameError::Value { what, found });
    assert_eq!(
        with(&made, 0, b"\x80\x04\x95pickle"[..8].as_ref()),
        Err(FrameError::Magic)
    );
    assert_eq!(
        with(&made, 8, &2u16.to_le_bytes()),
        Err(FrameError::Version(2))
    );
    assert_eq!(with(&made, 10, &4u16.to_le_bytes()), value("flags", 4));
    assert_eq!(with(&made, 176, &0u32.to_le_bytes()), value("tokens", 0));
    assert_eq!(
        with(&made, 176, &u32::MAX.to_le_bytes()),
        value("tokens", u32::MAX.into())
    );
    assert_eq!(
        with(&made, 180, &0u32.to_le_bytes()),
        value("bytes per token", 0)
    );
    assert_eq!(
        with(&made, 184, &u32::MAX.to_le_bytes()),
        value("source position", u32::MAX.into())
    );
    assert_eq!(with(&made, 208, &[4]), value("provenance", 4));
    for (at, what) in [
        (12, "the head"),
        (16, "the frame"),
        (40, "the frame"),
        (196, "the head"),
        (200, "the head"),
    ] {
        let error = with(&made, at, &(1u64 << 63).to_le_bytes()[4..]);
        assert!(
            matches!(error, Err(FrameError::Length { what: found, .. }) if found == what)
                || at == 40
                || at == 16,
            "{at}: {error:?}"
        );
        assert!(error.is_err(), "{at}");
    }
    // Lengths of 2^63 that agree with each other.
    let mut bytes = made.parts().encode();
    let head_len = u64::from(u32::from_le_bytes(bytes[12..16].try_into().expect("four")));
    bytes[40..48].copy_from_slice(&(1u64 << 63).to_le_bytes());
    bytes[16..24].copy_from_slice(&((1u64 << 63) + head_len).to_le_bytes());
    bytes[206..208].copy_from_slice(&Codec::CACHEGEN.0.to_le_bytes());
    seal(&mut bytes);
    let error = Frame::parse(&bytes).map(|_| ());
    assert!(
        matches!(
            error,
            Err(FrameError::Length {
                what: "the payload",
                ..
            })
        ),
        "{error:?}"
    );
}

/// Case c03: a coded payload can't ask for more room than its size allows.
#[test]
fn case_c03_a_small_payload_cannot_claim_a_large_one() {
    let mut small = made((0..8).collect(), vec![], false, 0, 16);
    small.header.codec = Codec::CACHEGEN;
    small.header.bytes_per_token = u32::MAX;
    let bytes = small.parts().encode();
    let error = Frame::parse(&bytes).map(|_| ());
    assert_eq!(
        error,
        Err(FrameError::Value {
            what: "payload length",
            found: 128
        })
    );
}

/// Cases c03 and s13: another key's record, another tenant's, or other tokens under a key are told apart.
#[test]
fn case_c03_another_record_is_refused() {
    let made = made((0..8).collect(), vec![], false, 0, 4);
    let (header, key) = (made.header, made.header.key);
    let other = Namespace::new(&[("model", b"weights")], b"another salt");
    assert_eq!(
        header.verify(&namespace(), &[1; 32], &made.tokens),
        Err(FrameError::Identity("key"))
    );
    assert_eq!(
        header.verify(&other, &key, &made.tokens),
        Err(FrameError::Identity("namespace"))
    );
    assert_eq!(
        header.verify(&namespace(), &key, &[9; 8]),
        Err(FrameError::Identity("content"))
    );
}

/// The bytes are those of the documented format, on every machine.
#[test]
fn golden_bytes() {
    let mut made = made(vec![1, 2, 3], vec![0xaa], true, 1, 2);
    made.scores = Some(vec![0.5, 1.0, 2.0]);
    let bytes = made.parts().encode();
    assert_eq!(bytes.len(), 280 + 6);
    assert_eq!(
        &bytes[..24],
        b"blendfrm\x01\0\x01\0\x18\x01\0\0\x1e\x01\0\0\0\0\0\0"
    );
    assert_eq!(&bytes[216..229], [0xaa, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    assert_eq!(
        &bytes[229..241],
        [0, 0, 0, 0x3f, 0, 0, 0x80, 0x3f, 0, 0, 0, 0x40]
    );
    assert_eq!(&bytes[273..280], [0; 7]);
    assert_eq!(xxh3_64(&bytes), GOLDEN, "{:#x}", xxh3_64(&bytes));
}

const GOLDEN: u64 = 0x63e6_cf2d_2176_deda;
