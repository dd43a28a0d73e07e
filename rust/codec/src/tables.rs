//! What `cachegen` has learnt about one namespace: per layer a prediction, a basis and a class for each component, and
//! the probabilities of each class. Trained once (`blendstore.codec.train`), read here, named by a digest.
//!
//! The file, little-endian; `w = 2 × kv heads × head dim` channels are a layer's keys (not rotated), then its values:
//!
//! ```text
//!   0  magic "blendtbl"      8     24  head dim          4     48  positions kept raw   4
//!   8  version = 1           2     28  rotary elements   4     52  classes              4
//!  10  element type          1     32  frequency sets    4     56  step            f32  4
//!  11  rotary style          1     36  block             4     60  dead zone       f32  4
//!  12  zeros                 4     40  chain             4
//!  16  layers                4     44  zeros             4
//!  20  kv heads              4
//!  64  frequency set of each layer u32 × layers, 0xffffffff: keys are not rotated
//!      frequencies f32 × sets × rotary elements / 2
//!      per class: frequencies u16 × 256 | shifts f32 × 3
//!      per layer: mean f32 × w | scale f32 × w | class of component u8 × w
//!                 | basis f16 × w/block × [block channels][block components]
//!                 | prediction f16 × [w channels of the layer before][w], unless layer mod chain is 0
//! ```

use std::fmt;

use crate::coder::CodecError;
use crate::elements::{Element, half_to_single};
use crate::linear::Matrix;
use crate::rans;
use crate::rotary::Style;

/// First bytes of a table file.
pub const MAGIC: [u8; 8] = *b"blendtbl";
/// The only version there is.
pub const VERSION: u16 = 1;
/// Symbol of a value that is too large, or improbable, for its class: it follows apart.
pub(crate) const ESCAPE: u8 = 0;
/// Symbol of the value 0.
pub(crate) const ZERO: u8 = 128;

const FIXED: usize = 64;

/// Names a table file: the first half of its BLAKE3 digest.
pub type TableId = [u8; 16];

/// One table file, ready for use.
pub struct Tables {
    pub(crate) id: TableId,
    pub(crate) element: Element,
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) rotary: Style,
    pub(crate) chain: usize,
    pub(crate) raw_positions: u32,
    pub(crate) step: f32,
    pub(crate) dead_zone: f32,
    /// Frequency set of each layer.
    pub(crate) sets: Vec<Option<usize>>,
    pub(crate) frequencies: Vec<Vec<f32>>,
    pub(crate) classes: Vec<Class>,
    pub(crate) bases: Vec<Layer>,
}

/// A class of components that are about equally wide.
pub(crate) struct Class {
    pub(crate) table: rans::Table,
    /// What each symbol stands for: the mean of what it was made of. The escape stands for nothing.
    pub(crate) levels: [f32; 256],
    /// What each symbol takes, in 1/256 bits.
    pub(crate) costs: [u32; 256],
}

/// How one layer is turned into components.
pub(crate) struct Layer {
    pub(crate) mean: Vec<f32>,
    pub(crate) scale: Vec<f32>,
    pub(crate) prediction: Option<Matrix>,
    pub(crate) blocks: Vec<Block>,
}

/// Channels that are turned together. Only components whose class has more than one symbol exist.
pub(crate) struct Block {
    pub(crate) first: usize,
    pub(crate) forward: Matrix,
    pub(crate) back: Matrix,
    /// (class, number of components), in order of the matrices' components.
    pub(crate) runs: Vec<(usize, usize)>,
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tables")
            .field("id", &self.id)
            .field("layers", &self.layers)
            .field("kv_heads", &self.kv_heads)
            .field("head_dim", &self.head_dim)
            .finish_non_exhaustive()
    }
}

impl Tables {
    /// Reads a table file.
    ///
    /// # Errors
    /// For bytes that are none, with what is wrong. Nothing is allocated beyond the scale of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, CodecError> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.take(8)? != MAGIC {
            return Err(CodecError(
                "not a codec table: it begins with other bytes".into(),
            ));
        }
        let version = u16::from_le_bytes(reader.array()?);
        if version != VERSION {
            return Err(CodecError(format!(
                "codec table version {version}, but this program reads version {VERSION}"
            )));
        }
        let [element, style] = reader.array()?;
        let element = Element::new(element)?;
        let rotary = match style {
            0 => Style::None,
            1 => Style::Halves,
            2 => Style::Interleaved,
            _ => return Err(value("rotary style", u64::from(style))),
        };
        reader.take(4)?;
        let layers = reader.number("layers", 1, 4096)?;
        let kv_heads = reader.number("kv heads", 1, 4096)?;
        let head_dim = reader.number("head dim", 1, 4096)?;
        let rotary_elements = reader.number("rotary elements", 0, head_dim)?;
        let sets = reader.number("frequency sets", 0, layers)?;
        let width = 2 * kv_heads * head_dim;
        let block = reader.number("block", 1, width)?;
        let chain = reader.number("chain", 1, layers)?;
        reader.take(4)?;
        let raw_positions = reader.number("positions kept raw", 0, 1 << 20)? as u32;
        let class_count = reader.number("classes", 1, 256)?;
        let (step, dead_zone) = (reader.float()?, reader.float()?);
        debug_assert_eq!(reader.at, FIXED);
        if !width.is_multiple_of(block) || !rotary_elements.is_multiple_of(2) {
            return Err(value("block or rotary elements", block as u64));
        }
        let usable = step > 0.0 && step.is_finite() && (0.0..=0.5).contains(&dead_zone);
        if !usable {
            return Err(CodecError(format!(
                "step {step} and dead zone {dead_zone}, which no table has"
            )));
        }
        let predicted = layers - layers.div_ceil(chain);
        let expected = FIXED as u128
            + 4 * layers as u128
            + 2 * (sets * rotary_elements) as u128
            + class_count as u128 * (512 + 12)
            + layers as u128 * (9 * width as u128 + 2 * (width * block) as u128)
            + predicted as u128 * 2 * (width * width) as u128;
        if bytes.len() as u128 != expected {
            return Err(CodecError(format!(
                "codec table is {} bytes, not {expected}",
                bytes.len()
            )));
        }
        let sets_of_layers = (0..layers)
            .map(|_| match reader.u32()? {
                u32::MAX => Ok(None),
                set if (set as usize) < sets => Ok(Some(set as usize)),
                set => Err(value("frequency set", u64::from(set))),
            })
            .collect::<Result<_, _>>()?;
        let frequencies = (0..sets)
            .map(|_| reader.floats(rotary_elements / 2))
            .collect::<Result<Vec<_>, CodecError>>()?;
        let classes = (0..class_count)
            .map(|_| Class::read(&mut reader, step))
            .collect::<Result<Vec<_>, _>>()?;
        let bases = (0..layers)
            .map(|layer| Layer::read(&mut reader, width, block, layer % chain != 0, &classes))
            .collect::<Result<_, _>>()?;
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
        Ok(Tables {
            id,
            element,
            layers,
            kv_heads,
            head_dim,
            rotary,
            chain,
            raw_positions,
            step,
            dead_zone,
            sets: sets_of_layers,
            frequencies,
            classes,
            bases,
        })
    }

    /// Names these tables.
    #[must_use]
    pub fn id(&self) -> TableId {
        self.id
    }

    /// Channels of a layer, keys and values.
    pub(crate) fn width(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }

    /// Payload bytes of one token.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        self.layers * self.width() * self.element.size()
    }

    /// Runs of layers that are predicted one from the other, each a stream of its own.
    pub(crate) fn chains(&self) -> usize {
        self.layers.div_ceil(self.chain)
    }
}

impl Class {
    fn read(reader: &mut Reader<'_>, step: f32) -> Result<Self, CodecError> {
        let mut frequencies = [0; 256];
        for (frequency, bytes) in frequencies
            .iter_mut()
            .zip(reader.take(512)?.as_chunks::<2>().0)
        {
            *frequency = u16::from_le_bytes(*bytes);
        }
        let table =
            rans::Table::new(&frequencies).map_err(|error| CodecError(error.to_string()))?;
        if table.only().is_none_or(|only| only != ZERO) && frequencies[usize::from(ESCAPE)] == 0 {
            return Err(CodecError(
                "a class of the codec table has no escape symbol".into(),
            ));
        }
        let shifts = [reader.float()?, reader.float()?, reader.float()?];
        if shifts.iter().any(|shift| !(-0.5..=0.5).contains(shift)) {
            return Err(CodecError(format!("shifts {shifts:?}, which no class has")));
        }
        let mut levels = [0.0; 256];
        for (level, symbol) in levels.iter_mut().zip(-i32::from(ZERO)..) {
            let size = symbol.unsigned_abs();
            if size > 0 {
                let value = (size as f32 - shifts[(size as usize - 1).min(2)]) * step;
                *level = if symbol < 0 { -value } else { value };
            }
        }
        Ok(Class {
            costs: frequencies.map(rans::cost),
            table,
            levels,
        })
    }

    /// Whether its components are left out, being zero.
    pub(crate) fn is_zero(&self) -> bool {
        self.table.only().is_some()
    }
}

impl Layer {
    fn read(
        reader: &mut Reader<'_>,
        width: usize,
        block: usize,
        predicted: bool,
        classes: &[Class],
    ) -> Result<Self, CodecError> {
        let mean = reader.floats(width)?;
        let scale = reader.floats(width)?;
        if !scale.iter().all(|scale| *scale > 0.0 && scale.is_finite()) {
            return Err(CodecError(
                "a scale of the codec table is not above zero".into(),
            ));
        }
        let class = reader.take(width)?;
        if let Some(class) = class
            .iter()
            .find(|class| usize::from(**class) >= classes.len())
        {
            return Err(value("class", u64::from(*class)));
        }
        let mut blocks = Vec::with_capacity(width / block);
        for first in (0..width).step_by(block) {
            let basis = reader.halves(block * block)?;
            let mut order: Vec<usize> = (0..block)
                .filter(|&c| !classes[usize::from(class[first + c])].is_zero())
                .collect();
            order.sort_by_key(|&c| class[first + c]);
            let mut runs: Vec<(usize, usize)> = vec![];
            for &component in &order {
                let class = usize::from(class[first + component]);
                match runs.last_mut() {
                    Some((last, count)) if *last == class => *count += 1,
                    _ => runs.push((class, 1)),
                }
            }
            let forward = Matrix::new(block, order.len(), |channel, at| {
                basis[channel * block + order[at]]
            });
            let back = Matrix::new(order.len(), block, |at, channel| {
                basis[channel * block + order[at]]
            });
            blocks.push(Block {
                first,
                forward,
                back,
                runs,
            });
        }
        let prediction = if predicted {
            let values = reader.halves(width * width)?;
            Some(Matrix::new(width, width, |from, to| {
                values[from * width + to]
            }))
        } else {
            None
        };
        Ok(Layer {
            mean,
            scale,
            prediction,
            blocks,
        })
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], CodecError> {
        let end = self
            .at
            .checked_add(len)
            .filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| CodecError("codec table ends too early".into()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, CodecError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn number(&mut self, what: &str, low: usize, high: usize) -> Result<usize, CodecError> {
        let found = self.u32()?;
        if (low as u64..=high as u64).contains(&u64::from(found)) {
            Ok(found as usize)
        } else {
            Err(value(what, u64::from(found)))
        }
    }

    fn float(&mut self) -> Result<f32, CodecError> {
        Ok(f32::from_le_bytes(self.array()?))
    }

    fn floats(&mut self, count: usize) -> Result<Vec<f32>, CodecError> {
        let values: Vec<f32> = self
            .take(4 * count)?
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        finite(values)
    }

    fn halves(&mut self, count: usize) -> Result<Vec<f32>, CodecError> {
        let bytes = self.take(2 * count)?.as_chunks::<2>().0;
        finite(
            bytes
                .iter()
                .map(|b| half_to_single(u16::from_le_bytes(*b)))
                .collect(),
        )
    }
}

fn finite(values: Vec<f32>) -> Result<Vec<f32>, CodecError> {
    if values.iter().all(|value| value.is_finite()) {
        Ok(values)
    } else {
        Err(CodecError(
            "a number of the codec table is not finite".into(),
        ))
    }
}

fn value(what: &str, found: u64) -> CodecError {
    CodecError(format!("{what} is {found}, which no codec table has"))
}
