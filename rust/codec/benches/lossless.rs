//! Speed of `lossless` on one core, in bytes of bf16 records that look like keys and values: normally distributed, each
//! channel as wide as it likes.

mod timing;

use std::hint::black_box;

use blendstore_codec::{Codec, Coder, Element, Header, Lossless};

const TOKENS: usize = 256;
const PLANES: usize = 60;
const CHANNELS: usize = 192;
const ROUNDS: usize = 101;

fn main() {
    let payload = payload();
    let coder = Lossless::new(Some(Element::Bf16), PLANES);
    let header = header(payload.len());
    let mut coded = vec![];
    let encode = timing::timed(ROUNDS, || {
        coded.clear();
        coder
            .encode(&header, &[], black_box(&payload), &mut coded)
            .expect("it is smaller");
    });
    let mut back = vec![0; payload.len()];
    let decode = timing::timed(ROUNDS, || {
        coder
            .decode(&header, &[], black_box(&coded), &mut back)
            .expect("what was encoded decodes");
    });
    assert!(back == payload, "not what was encoded");
    let smaller = payload.len() as f64 / coded.len() as f64;
    println!(
        "lossless, smaller by {smaller:.2}: encode {}, decode {}",
        timing::speed(payload.len(), encode),
        timing::speed(payload.len(), decode)
    );
}

fn payload() -> Vec<u8> {
    let mut x = 1_u64;
    let mut uniform = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 11) as f64 / (1_u64 << 53) as f64
    };
    let mut payload = vec![];
    for _ in 0..PLANES {
        let widths: Vec<f64> = (0..CHANNELS).map(|_| (2.0 * uniform()).exp()).collect();
        for _ in 0..TOKENS {
            for width in &widths {
                let normal = (0..6).map(|_| uniform()).sum::<f64>() - 3.0;
                let bits = ((width * normal) as f32).to_bits();
                payload.extend_from_slice(&((bits >> 16) as u16).to_le_bytes());
            }
        }
    }
    payload
}

fn header(len: usize) -> Header {
    Header {
        key: [0; 32],
        parent: [0; 32],
        namespace: [0; 32],
        context: [0; 32],
        ntokens: TOKENS as u32,
        bytes_per_token: (len / TOKENS) as u32,
        source_position: 0,
        segment_offset: 0,
        behind_tokens: 0,
        format: 0,
        codec: Codec::LOSSLESS,
        provenance: 1,
        rank: 0,
    }
}
