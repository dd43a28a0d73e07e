//! A switch that turns a failing remote off, so that nobody waits for it, and tries it again now and then.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::chance::Chance;

/// Failures in a row that open it.
const TOLERATED: u32 = 3;
/// The first pause, and the longest; each is twice the one before.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);

/// Closed while calls succeed. After three failures in a row it is open for a pause, in which every call is refused. Then one
/// call goes through as a probe: if that succeeds the switch closes, otherwise it stays open for twice the pause.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    failures: u32,
    open: Option<Open>,
    chance: Chance,
}

#[derive(Debug)]
struct Open {
    until: Instant,
    pause: Duration,
    probing: bool,
}

/// Leave for one call. Dropped without a verdict it counts as a failure, so that a probe can't be lost.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    breaker: &'a Breaker,
    settled: bool,
}

/// What a verdict changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing.
    None,
    /// The remote is off.
    Off,
    /// It is on again.
    On,
}

impl Breaker {
    /// Leave for one call, unless the switch is open.
    pub fn pass(&self, now: Instant) -> Option<Pass<'_>> {
        if let Some(open) = &mut self.lock().open {
            if open.probing || now < open.until {
                return None;
            }
            open.probing = true;
        }
        Some(Pass {
            breaker: self,
            settled: false,
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle(&self, succeeded: bool, now: Instant) -> Turn {
        let mut inner = self.lock();
        let inner = &mut *inner;
        if succeeded {
            inner.failures = 0;
            return if inner.open.take().is_some() {
                Turn::On
            } else {
                Turn::None
            };
        }
        inner.failures = inner.failures.saturating_add(1);
        match &mut inner.open {
            Some(open) if open.probing => {
                open.pause = (open.pause * 2).min(LONGEST);
                open.until = now + inner.chance.around(open.pause);
                open.probing = false;
                Turn::None
            }
            // A call that began before the switch opened.
            Some(_) => Turn::None,
            None if inner.failures >= TOLERATED => {
                inner.open = Some(Open {
                    until: now + inner.chance.around(SHORTEST),
                    pause: SHORTEST,
                    probing: false,
                });
                Turn::Off
            }
            None => Turn::None,
        }
    }
}

impl Pass<'_> {
    /// The call reached the remote, whatever it answered.
    pub fn succeeded(mut self) -> Turn {
        self.settled = true;
        self.breaker.settle(true, Instant::now())
    }

    /// It did not.
    pub fn failed(mut self) -> Turn {
        self.settled = true;
        self.breaker.settle(false, Instant::now())
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.breaker.settle(false, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(breaker: &Breaker, now: Instant) -> Turn {
        let mut pass = breaker.pass(now).expect("closed, or time for a probe");
        pass.settled = true;
        breaker.settle(false, now)
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_one_success_between_them_does_not() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        assert_eq!(fail(&breaker, now), Turn::None);
        assert_eq!(fail(&breaker, now), Turn::None);
        assert_eq!(breaker.pass(now).unwrap().succeeded(), Turn::None);
        assert_eq!(fail(&breaker, now), Turn::None);
        assert_eq!(fail(&breaker, now), Turn::None);
        assert_eq!(fail(&breaker, now), Turn::Off);
        assert!(breaker.pass(now).is_none());
    }

    #[test]
    fn one_probe_at_a_time_and_its_success_closes_it() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..TOLERATED {
            fail(&breaker, now);
        }
        let later = now + SHORTEST * 2;
        let probe = breaker.pass(later).expect("time for a probe");
        assert!(
            breaker.pass(later).is_none(),
            "a second call waits for the probe's verdict"
        );
        assert_eq!(probe.succeeded(), Turn::On);
        assert!(breaker.pass(later).is_some());
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let (breaker, mut now) = (Breaker::default(), Instant::now());
        for _ in 0..TOLERATED {
            fail(&breaker, now);
        }
        let mut pauses = vec![];
        for _ in 0..10 {
            let open = |breaker: &Breaker| breaker.lock().open.as_ref().unwrap().until;
            now = open(&breaker);
            fail(&breaker, now);
            pauses.push(open(&breaker) - now);
        }
        for (pause, expected) in pauses
            .iter()
            .zip([0.5, 1., 2., 4., 8., 16., 30., 30., 30., 30.])
        {
            let ratio = pause.as_secs_f64() / expected;
            assert!((0.5..=1.5).contains(&ratio), "{pause:?} for {expected} s");
        }
    }

    #[test]
    fn a_probe_that_is_dropped_is_not_lost() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..TOLERATED {
            fail(&breaker, now);
        }
        drop(breaker.pass(now + SHORTEST * 2).unwrap());
        assert!(breaker.pass(now + LONGEST * 3).is_some());
    }
}
