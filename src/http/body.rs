//! Response bodies: the service's own, or a refusal's few bytes.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// The body of a refusal: a few bytes, in one frame.
#[derive(Clone, Debug, Default)]
pub struct RefusalBody(Option<Bytes>);

impl RefusalBody {
    pub(super) fn len(&self) -> usize {
        self.0.as_ref().map_or(0, Bytes::len)
    }
}

impl<T: Into<Bytes>> From<T> for RefusalBody {
    fn from(bytes: T) -> Self {
        Self(Some(bytes.into()).filter(|bytes| !bytes.is_empty()))
    }
}

impl Body for RefusalBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(u64::try_from(self.len()).unwrap_or(u64::MAX))
    }
}

pin_project_lite::pin_project! {
    /// The body of a response that went through a rate limit: the service's own, or a refusal's.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        of: Of<B>,
    }
}

pin_project_lite::pin_project! {
    #[derive(Debug)]
    #[project = Projected]
    enum Of<B> {
        Service { #[pin] body: B },
        Refusal { #[pin] body: RefusalBody },
    }
}

impl<B> ResponseBody<B> {
    pub(super) const fn of_service(body: B) -> Self {
        Self {
            of: Of::Service { body },
        }
    }

    pub(super) const fn of_refusal(body: RefusalBody) -> Self {
        Self {
            of: Of::Refusal { body },
        }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match self.project().of.project() {
            Projected::Service { body } => body.poll_frame(context),
            Projected::Refusal { body } => {
                let frame = ready!(body.poll_frame(context));
                Poll::Ready(frame.map(|frame| match frame {
                    Ok(frame) => Ok(frame.map_data(B::Data::from)),
                    Err(never) => match never {},
                }))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.of {
            Of::Service { body } => body.is_end_stream(),
            Of::Refusal { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.of {
            Of::Service { body } => body.size_hint(),
            Of::Refusal { body } => body.size_hint(),
        }
    }
}
