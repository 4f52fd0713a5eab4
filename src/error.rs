//! One error type for the whole crate: a pinned status number and a sentence.

use std::borrow::Cow;

/// The numbers that cross the C boundary. Pinned, with gaps between groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Status {
    /// The call was accepted; on the CPU its work is done.
    Ok = 0,
    /// A field has a value that can never be right.
    InvalidArgument = 1,
    /// A handle is null, stale, destroyed or of another type.
    InvalidHandle = 2,
    /// A position or a count lies outside what the slot holds; nothing changed.
    OutOfRange = 3,
    /// The caller's buffer is too small.
    BufferTooSmall = 4,
    /// The stream belongs to another context or device, or the backend takes none.
    WrongStream = 5,
    /// An option, shape, dtype or descriptor of a newer header that this library does not know.
    Unsupported = 20,
    /// No CUDA in this build, or no usable driver.
    NoCuda = 21,
    /// The device's architecture is not one that this library has kernels for.
    NoCodeForArch = 22,
    /// An allocation failed.
    OutOfMemory = 40,
    /// The CUDA driver refused a call.
    Cuda = 41,
    /// The CUDA context has failed for good.
    DeviceLost = 42,
    /// The stream captures, and the call waits for its work.
    Capturing = 60,
    /// A blob is no blob of this library, or not one for this handle.
    BadBlob = 61,
    /// A defect of this library: a panic was caught at the boundary.
    Internal = 90,
}

/// Every way in which a call can fail. The text names the field, its value and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A field has a value that can never be right.
    #[error("{field} is {value}; expected {expected}")]
    InvalidArgument {
        /// Name of the field as the header spells it.
        field: Cow<'static, str>,
        /// The value given.
        value: String,
        /// What would have been right.
        expected: Cow<'static, str>,
    },
    /// A field asks for something that this library does not do.
    #[error("{field} is {value}; this library supports {expected}")]
    Unsupported {
        /// Name of the field as the header spells it.
        field: Cow<'static, str>,
        /// The value given.
        value: String,
        /// What is supported.
        expected: Cow<'static, str>,
    },
    /// A handle is null, stale, destroyed or of another type.
    #[error("{argument} is not a live {expected} handle: {reason}")]
    InvalidHandle {
        /// Name of the argument.
        argument: Cow<'static, str>,
        /// What the handle should be.
        expected: Cow<'static, str>,
        /// Null, destroyed, of another type, or never a handle.
        reason: Cow<'static, str>,
    },
    /// A position or a count lies outside what the slot holds.
    #[error("{field} is {value}; there are {expected}")]
    OutOfRange {
        /// Name of the field.
        field: Cow<'static, str>,
        /// The value given.
        value: String,
        /// What there is.
        expected: String,
    },
    /// The caller's buffer is too small.
    #[error("{field} is {value}; at least {needed} is needed")]
    BufferTooSmall {
        /// Name of the capacity field.
        field: Cow<'static, str>,
        /// The capacity given.
        value: u64,
        /// The capacity needed.
        needed: u64,
    },
    /// The stream does not fit the backend.
    #[error("exec.stream is {value}; {expected}")]
    WrongStream {
        /// The stream given.
        value: String,
        /// What was expected.
        expected: Cow<'static, str>,
    },
    /// CUDA cannot be used.
    #[error("{0}")]
    NoCuda(String),
    /// There are no kernels for the device.
    #[error("{device} is {arch}; this library has kernels for {expected}")]
    NoCode {
        /// Name of the device.
        device: String,
        /// Its architecture.
        arch: String,
        /// Architectures that there is code for.
        expected: String,
    },
    /// The CUDA driver refused a call.
    #[error("{call} failed: {text}")]
    Cuda {
        /// Name of the driver's function.
        call: Cow<'static, str>,
        /// The CUresult.
        code: i32,
        /// Its name and the driver's sentence.
        text: String,
    },
    /// The CUDA context has failed for good, by whoever's work.
    #[error("the CUDA context on device {device} is lost: {call} failed with {text}; no later call can succeed on it")]
    DeviceLost {
        /// Ordinal of the device.
        device: i32,
        /// Name of the driver's function that told first.
        call: &'static str,
        /// The CUresult.
        code: i32,
        /// Its name and the driver's sentence.
        text: String,
    },
    /// An allocation failed.
    #[error("{what} could not be allocated{}", bytes.map_or_else(String::new, |bytes| format!(" ({bytes} bytes)")))]
    OutOfMemory {
        /// What the memory was for.
        what: Cow<'static, str>,
        /// How much was asked for, where that is known.
        bytes: Option<u64>,
    },
    /// The stream captures.
    #[error(
        "exec.stream is {value}, which captures; a stream that does not is expected, because the call waits for its work"
    )]
    Capturing {
        /// The stream given.
        value: String,
    },
    /// A blob cannot be restored.
    #[error("{field} is {value}; expected {expected}")]
    BadBlob {
        /// What of the blob.
        field: Cow<'static, str>,
        /// What it is.
        value: String,
        /// What would have been right.
        expected: Cow<'static, str>,
    },
    /// A defect of this library.
    #[error("internal error: {0}")]
    Internal(String),
}

impl Error {
    /// The number that the C interface returns for this error.
    pub fn status(&self) -> Status {
        match self {
            Error::InvalidArgument { .. } => Status::InvalidArgument,
            Error::Unsupported { .. } => Status::Unsupported,
            Error::InvalidHandle { .. } => Status::InvalidHandle,
            Error::OutOfRange { .. } => Status::OutOfRange,
            Error::BufferTooSmall { .. } => Status::BufferTooSmall,
            Error::WrongStream { .. } => Status::WrongStream,
            Error::NoCuda(_) => Status::NoCuda,
            Error::NoCode { .. } => Status::NoCodeForArch,
            Error::Cuda { .. } => Status::Cuda,
            Error::DeviceLost { .. } => Status::DeviceLost,
            Error::OutOfMemory { .. } => Status::OutOfMemory,
            Error::Capturing { .. } => Status::Capturing,
            Error::BadBlob { .. } => Status::BadBlob,
            Error::Internal(_) => Status::Internal,
        }
    }

    /// Shorthand for [`Error::InvalidArgument`].
    pub fn invalid(
        field: impl Into<Cow<'static, str>>,
        value: impl ToString,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Error::InvalidArgument { field: field.into(), value: value.to_string(), expected: expected.into() }
    }

    /// Shorthand for [`Error::BadBlob`].
    pub fn bad_blob(
        field: impl Into<Cow<'static, str>>,
        value: impl ToString,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Error::BadBlob { field: field.into(), value: value.to_string(), expected: expected.into() }
    }

    /// Shorthand for [`Error::Unsupported`].
    pub fn unsupported(
        field: impl Into<Cow<'static, str>>,
        value: impl ToString,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Error::Unsupported { field: field.into(), value: value.to_string(), expected: expected.into() }
    }
}

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_named_where_they_are_known() {
        let text = |bytes| Error::OutOfMemory { what: "a pool".into(), bytes }.to_string();
        assert_eq!(text(Some(4096)), "a pool could not be allocated (4096 bytes)");
        assert_eq!(text(None), "a pool could not be allocated");
    }
}
