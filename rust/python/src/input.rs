//! Arguments on their way in: buffers without a copy, numbers with their ranges, packed keys.

use std::marker::PhantomData;
use std::ops::Range;

use blendstore_blend::rotation::{Pairing, Rotation};
use blendstore_core::Key;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::refuse;

/// Items that buffers may have.
pub(crate) trait Item: Copy {
    /// What is accepted, in words.
    const ACCEPTED: &'static str;
    /// The same for the buffer protocol.
    const ELEMENT: ElementType;
}

impl Item for u8 {
    const ACCEPTED: &'static str = "a C-contiguous buffer of bytes (bytes, numpy uint8)";
    const ELEMENT: ElementType = ElementType::UnsignedInteger { bytes: 1 };
}

impl Item for u32 {
    const ACCEPTED: &'static str = "a C-contiguous buffer of uint32 (numpy uint32)";
    const ELEMENT: ElementType = ElementType::UnsignedInteger { bytes: 4 };
}

impl Item for i64 {
    const ACCEPTED: &'static str = "a C-contiguous buffer of int64 (numpy int64)";
    const ELEMENT: ElementType = ElementType::SignedInteger { bytes: 8 };
}

impl Item for f32 {
    const ACCEPTED: &'static str = "a C-contiguous buffer of float32 (numpy float32)";
    const ELEMENT: ElementType = ElementType::Float { bytes: 4 };
}

/// A Python buffer that is read in place. It must not be written to while the call that it was given to runs.
pub(crate) struct Input<T> {
    buffer: PyUntypedBuffer,
    item: PhantomData<T>,
}

impl<T: Item> Input<T> {
    /// Borrows `object`, which is the argument `name`.
    pub(crate) fn new(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = get(name, object, T::ACCEPTED)?;
        let format = buffer.format();
        let fits = ElementType::from_format(format) == T::ELEMENT
            && buffer.item_size() == size_of::<T>()
            && (size_of::<T>() == 1 || !matches!(format.to_bytes().first(), Some(b'>' | b'!')));
        if !fits {
            let value = format!("a buffer of format '{}'", format.to_string_lossy());
            return Err(refuse(name, value, T::ACCEPTED));
        }
        if !buffer.is_c_contiguous() {
            return Err(refuse(name, "a buffer with strides", T::ACCEPTED));
        }
        if !buffer.buf_ptr().cast::<T>().is_aligned() {
            return Err(refuse(name, "a misaligned buffer", T::ACCEPTED));
        }
        Ok(Self {
            buffer,
            item: PhantomData,
        })
    }

    /// The same, of an argument that may be left out.
    pub(crate) fn optional(
        name: &'static str,
        object: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Self>> {
        object.map(|object| Self::new(name, object)).transpose()
    }

    /// Its items.
    pub(crate) fn as_slice(&self) -> &[T] {
        let len = self.buffer.item_count();
        if len == 0 {
            return &[];
        }
        // SAFETY: C-contiguous, aligned, of that item type (checked in `new`), and exported for as long as `self` lives.
        // That nobody writes meanwhile is the documented duty of the caller; every bit pattern is a valid item.
        unsafe { std::slice::from_raw_parts(self.buffer.buf_ptr().cast(), len) }
    }
}

impl<T> Input<T> {
    /// Its shape.
    pub(crate) fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// Its addresses.
    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.buffer.buf_ptr() as usize;
        start..start + self.buffer.len_bytes()
    }
}

/// A writable Python buffer that is changed in place. Nobody else may use it while the call that it was given to runs.
pub(crate) struct InPlace<T>(pub(crate) Input<T>);

impl<T: Item> InPlace<T> {
    /// Borrows `object`, which is the argument `name`.
    pub(crate) fn new(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let input = Input::<T>::new(name, object)?;
        if input.buffer.readonly() {
            let accepted = format!("{} that can be written to", T::ACCEPTED);
            return Err(refuse(name, "a read-only buffer", accepted));
        }
        Ok(Self(input))
    }

    /// Its items.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        let len = self.0.buffer.item_count();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: as in `Input::as_slice`, and writable (checked in `new`). That no other buffer of the call overlaps with it
        // is checked by the call, that nobody else uses it meanwhile is the documented duty of the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.buffer.buf_ptr().cast(), len) }
    }
}

/// A writable Python buffer of any items.
pub(crate) struct Output(PyUntypedBuffer);

impl Output {
    /// Borrows `object`, which is the argument `name`.
    pub(crate) fn new(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let accepted = "a writable C-contiguous buffer";
        let buffer = get(name, object, accepted)?;
        if buffer.readonly() {
            return Err(refuse(name, "a read-only buffer", accepted));
        }
        if !buffer.is_c_contiguous() {
            return Err(refuse(name, "a buffer with strides", accepted));
        }
        Ok(Self(buffer))
    }

    /// Its bytes.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.0.len_bytes();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: C-contiguous, writable and exported for as long as `self` lives; that no other thread uses it meanwhile
        // is the duty of the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), len) }
    }
}

fn get(name: &'static str, object: &Bound<'_, PyAny>, accepted: &str) -> PyResult<PyUntypedBuffer> {
    PyUntypedBuffer::get(object).map_err(|_| {
        let kind = object
            .get_type()
            .name()
            .map_or_else(|_| "this".to_owned(), |name| name.to_string());
        PyTypeError::new_err(format!("{name}: {kind} is not accepted: {accepted}"))
    })
}

/// (start, stop) pairs from `int64[n, 2]`.
pub(crate) fn bounds(object: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, usize)>> {
    let input = Input::<i64>::new("bounds", object)?;
    let (pairs, rest) = input.as_slice().as_chunks();
    if !rest.is_empty() {
        let value = format!("{} numbers", input.as_slice().len());
        return Err(refuse(
            "bounds",
            value,
            "int64[n, 2], pairs of (start, stop)",
        ));
    }
    pairs
        .iter()
        .map(|&[start, stop]| Ok((count("bounds", start)?, count("bounds", stop)?)))
        .collect()
}

/// Prompt positions from `int64[n]`.
pub(crate) fn positions(object: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let input = Input::<i64>::new("positions", object)?;
    input
        .as_slice()
        .iter()
        .map(|&position| count("positions", position))
        .collect()
}

/// Packed keys, digests or content ids.
pub(crate) fn keys<'a>(name: &'static str, packed: &'a [u8]) -> PyResult<&'a [Key]> {
    let (keys, rest) = packed.as_chunks();
    if rest.is_empty() {
        return Ok(keys);
    }
    Err(refuse(
        name,
        format!("{} bytes", packed.len()),
        "packed keys of 32 bytes each",
    ))
}

/// One key.
pub(crate) fn key(name: &'static str, packed: &[u8]) -> PyResult<Key> {
    packed.try_into().map_err(|_| {
        refuse(
            name,
            format!("{} bytes", packed.len()),
            "one key of 32 bytes",
        )
    })
}

/// A number that is not negative.
pub(crate) fn count(name: &'static str, value: i64) -> PyResult<usize> {
    usize::try_from(value).map_err(|_| refuse(name, value, "a number that is not negative"))
}

/// A number of one byte.
pub(crate) fn byte(name: &'static str, value: i64) -> PyResult<u8> {
    u8::try_from(value).map_err(|_| refuse(name, value, "a number from 0 to 255"))
}

/// Heads and elements of each, of `[n, heads, dim]`.
pub(crate) fn heads_and_dim(name: &'static str, input: &Input<f32>) -> PyResult<[usize; 2]> {
    match *input.shape() {
        [_, heads, dim] => Ok([heads, dim]),
        ref other => Err(refuse(
            name,
            format!("{other:?}"),
            "[n, heads, dim] float32",
        )),
    }
}

/// Refuses a buffer that is not `[n, heads, dim]` with these heads and dim, which are those of `like`.
pub(crate) fn same_heads(
    name: &'static str,
    input: &Input<f32>,
    [heads, dim]: [usize; 2],
    like: &str,
) -> PyResult<()> {
    if heads_and_dim(name, input)? == [heads, dim] {
        return Ok(());
    }
    let accepted = format!("[n, {heads}, {dim}] float32, as {like}");
    Err(refuse(name, format!("{:?}", input.shape()), accepted))
}

/// The rotation of two tables `[positions, pairs]`, where there are any.
pub(crate) fn rotation<'a>(
    cos: Option<&'a Input<f32>>,
    sin: Option<&'a Input<f32>>,
    interleaved: bool,
) -> PyResult<Option<Rotation<'a>>> {
    let (cos, sin) = match (cos, sin) {
        (None, None) => return Ok(None),
        (Some(cos), Some(sin)) => (cos, sin),
        _ => return Err(refuse("cos, sin", "one of them", "both or none")),
    };
    let pairs = match (cos.shape(), sin.shape()) {
        (&[rows, pairs], &[others, same]) if rows == others && pairs == same => pairs,
        (one, other) => {
            let value = format!("{one:?} and {other:?}");
            let accepted = "[positions, pairs] float32 both";
            return Err(refuse("cos, sin", value, accepted));
        }
    };
    Ok(Some(Rotation {
        cos: cos.as_slice(),
        sin: sin.as_slice(),
        pairs,
        pairing: if interleaved {
            Pairing::Interleaved
        } else {
            Pairing::Half
        },
    }))
}

/// Refuses a buffer that shares memory with one that is written to.
pub(crate) fn apart<T>(
    name: &'static str,
    input: &Input<T>,
    written: &[&Input<f32>],
) -> PyResult<()> {
    let Range { start, end } = input.addresses();
    for other in written {
        let other = other.addresses();
        if start < other.end && other.start < end {
            let value = "memory that is written to";
            return Err(refuse(name, value, "memory of its own"));
        }
    }
    Ok(())
}
