//! Shadows of functions whose OM is on another host: this process keeps the memory, and the OM says what is in it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use m2m_fabric::proto::{Image, MAX_FUNCTIONS};
use smartep::shadow::{ShadowError, ShadowReader, ShadowWriter};

/// By function.
#[derive(Debug, Default)]
pub(super) struct Shadows(Mutex<BTreeMap<u32, (ShadowWriter, OwnedFd)>>);

impl Shadows {
    /// Makes a function's shadow what the image says. The first one may come before the function.
    pub(super) fn take(&self, image: &Image) -> Result<(), ShadowError> {
        if image.function >= MAX_FUNCTIONS {
            return Err(ShadowError::Image("there is no such function"));
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((writer, _)) = all.get_mut(&image.function) {
            return writer.publish_image(&image.bytes);
        }
        let (mut writer, fd) = ShadowWriter::new()?;
        writer.publish_image(&image.bytes)?;
        all.insert(image.function, (writer, fd));
        Ok(())
    }

    /// A function's shadow, if an image came.
    pub(super) fn get(&self, function: u32) -> Option<OwnedFd> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, fd) = all.get(&function)?;
        fd.as_fd().try_clone_to_owned().ok()
    }

    /// What is in a function's shadow.
    pub(super) fn image(&self, function: u32) -> Option<Image> {
        let bytes = ShadowReader::new(self.get(function)?).ok()?.image()?;
        Some(Image { function, bytes })
    }

    /// A function is not served any more.
    pub(super) fn forget(&self, function: u32) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(function: u32, content: u8) -> Image {
        let (mut writer, fd) = ShadowWriter::new().unwrap();
        writer
            .publish(&[content; 4096], &[], Default::default())
            .unwrap();
        let bytes = ShadowReader::new(fd).unwrap().image().unwrap();
        Image { function, bytes }
    }

    #[test]
    fn who_has_a_shadow_sees_later_images() {
        let shadows = Shadows::default();
        assert!(shadows.get(3).is_none());
        shadows.take(&image(3, 1)).unwrap();
        let reader = ShadowReader::new(shadows.get(3).unwrap()).unwrap();
        shadows.take(&image(3, 2)).unwrap();
        let mut byte = [0];
        assert!(reader.read(7, 9, &mut byte));
        assert_eq!(byte, [2]);
        assert_eq!(shadows.image(3), Some(image(3, 2)));
        shadows.forget(3);
        assert!(shadows.get(3).is_none());
    }

    #[test]
    fn an_image_that_is_none_makes_no_shadow() {
        let shadows = Shadows::default();
        let broken = Image {
            function: 0,
            bytes: vec![1, 2, 3],
        };
        assert!(shadows.take(&broken).is_err());
        assert!(shadows.take(&image(MAX_FUNCTIONS, 1)).is_err());
        assert!(shadows.get(0).is_none());
    }
}
