//! What the register side and the data path of one device share without locks.

use super::NO_VECTOR;
use smartep::irq::Irqs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};

/// ISR bit of a used buffer (virtio 1.3 §4.1.4.5).
const ISR_QUEUE: u8 = 1;
/// ISR bit of a configuration change.
const ISR_CONFIG: u8 = 2;

/// What belongs to one queue.
#[derive(Debug)]
struct QueueSignals {
    vector: AtomicU16,
    error_vector: AtomicU16,
    kicks: AtomicU64,
}

/// Interrupt vectors, ISR, DEVICE_NEEDS_RESET and counts of notifications of one device.
#[derive(Debug)]
pub struct Signals {
    irqs: Arc<Irqs>,
    msix: AtomicBool,
    config_vector: AtomicU16,
    queues: Vec<QueueSignals>,
    isr: AtomicU8,
    needs_reset: AtomicBool,
    config_generation: AtomicU8,
}

impl Signals {
    /// For a device with `queues` queues; nothing has a vector yet.
    pub fn new(irqs: Arc<Irqs>, queues: u16) -> Self {
        Self {
            irqs,
            msix: AtomicBool::new(false),
            config_vector: AtomicU16::new(NO_VECTOR),
            queues: (0..queues)
                .map(|_| QueueSignals {
                    vector: AtomicU16::new(NO_VECTOR),
                    error_vector: AtomicU16::new(NO_VECTOR),
                    kicks: AtomicU64::new(0),
                })
                .collect(),
            isr: AtomicU8::new(0),
            needs_reset: AtomicBool::new(false),
            config_generation: AtomicU8::new(0),
        }
    }

    /// Back to the state after power-on; counts stay.
    pub fn reset(&self) {
        self.config_vector.store(NO_VECTOR, Ordering::Relaxed);
        for queue in &self.queues {
            queue.vector.store(NO_VECTOR, Ordering::Relaxed);
            queue.error_vector.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.isr.store(0, Ordering::Relaxed);
        self.needs_reset.store(false, Ordering::Release);
    }

    /// Whether the function's MSI-X is enabled; without it interrupts are bits of the ISR.
    pub fn set_msix(&self, enabled: bool) {
        self.msix.store(enabled, Ordering::Release);
    }

    /// Vector of a queue.
    pub fn queue_vector(&self, queue: u16) -> u16 {
        self.queues
            .get(usize::from(queue))
            .map_or(NO_VECTOR, |q| q.vector.load(Ordering::Relaxed))
    }

    /// Sets the vector of a queue.
    pub fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(q) = self.queues.get(usize::from(queue)) {
            q.vector.store(vector, Ordering::Release);
        }
    }

    /// Sets the vector that says that a queue cannot go on, where a face has one for each queue.
    pub fn set_queue_error_vector(&self, queue: u16, vector: u16) {
        if let Some(q) = self.queues.get(usize::from(queue)) {
            q.error_vector.store(vector, Ordering::Release);
        }
    }

    /// A queue cannot go on: tells who has a vector for that.
    pub fn queue_failed(&self, queue: u16) {
        let queue = self.queues.get(usize::from(queue));
        let vector = queue.map_or(NO_VECTOR, |q| q.error_vector.load(Ordering::Acquire));
        if vector != NO_VECTOR {
            self.irqs.trigger(vector);
        }
    }

    /// Vector of configuration changes.
    pub fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Relaxed)
    }

    /// Sets the vector of configuration changes.
    pub fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(vector, Ordering::Release);
    }

    /// Tells the driver of used buffers in `queue`.
    pub fn interrupt_queue(&self, queue: u16) {
        if self.msix.load(Ordering::Acquire) {
            let vector = self.queue_vector(queue);
            if vector != NO_VECTOR {
                self.irqs.trigger(vector);
            }
        } else {
            self.isr.fetch_or(ISR_QUEUE, Ordering::Release);
        }
    }

    /// Tells the driver that the device configuration or the device status changed.
    pub fn interrupt_config(&self) {
        if self.msix.load(Ordering::Acquire) {
            let vector = self.config_vector();
            if vector != NO_VECTOR {
                self.irqs.trigger(vector);
            }
        } else {
            self.isr.fetch_or(ISR_CONFIG, Ordering::Release);
        }
    }

    /// The device configuration changed: a new generation (virtio 1.3 §2.5.1) and an interrupt.
    pub fn config_changed(&self) {
        self.config_generation.fetch_add(1, Ordering::AcqRel);
        self.interrupt_config();
    }

    /// Sets the generation of the device configuration, as another process left it.
    pub fn set_config_generation(&self, generation: u8) {
        self.config_generation.store(generation, Ordering::Release);
    }

    /// Generation of the device configuration.
    pub fn config_generation(&self) -> u8 {
        self.config_generation.load(Ordering::Acquire)
    }

    /// Reads and clears the ISR (virtio 1.3 §4.1.4.5).
    pub fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// The device cannot go on; tells the driver the first time. Answers whether it was the first.
    pub fn set_needs_reset(&self) -> bool {
        let first = !self.needs_reset.swap(true, Ordering::AcqRel);
        if first {
            self.interrupt_config();
        }
        first
    }

    /// Whether the device waits for a reset.
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Counts a notification by the driver. Answers whether the queue exists.
    pub fn count_kick(&self, queue: u16) -> bool {
        match self.queues.get(usize::from(queue)) {
            Some(q) => {
                q.kicks.fetch_add(1, Ordering::Relaxed);
                true
            }
            None => false,
        }
    }

    /// Notifications by the driver since start.
    pub fn kicks(&self, queue: u16) -> u64 {
        self.queues
            .get(usize::from(queue))
            .map_or(0, |q| q.kicks.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn a_queue_that_fails_is_told_by_its_own_vector_if_there_is_one() {
        let irqs = Irqs::new(4);
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        irqs.set(3, Some(fd)).unwrap();
        let signals = Signals::new(irqs.clone(), 2);
        signals.queue_failed(1);
        assert_eq!(irqs.raised(3), 0);
        signals.set_queue_error_vector(1, 3);
        signals.queue_failed(0);
        signals.queue_failed(7);
        assert_eq!(irqs.raised(3), 0);
        signals.queue_failed(1);
        assert_eq!(irqs.raised(3), 1);
        signals.reset();
        signals.queue_failed(1);
        assert_eq!(irqs.raised(3), 1);
    }
}
