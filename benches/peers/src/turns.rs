//! Peers that take turns: each does a share of its work in every round, so that what slows the
//! machine down for a while slows all of them.

use std::time::Duration;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    is_quick: bool,
    rounds: usize,
    /// About how long one peer works in one round.
    turn: Duration,
    /// For how long a figure is measured at least that is a sum of turns.
    figure: Duration,
}

impl Effort {
    pub(crate) const QUICK: Self = Self {
        is_quick: true,
        rounds: 11,
        turn: Duration::from_millis(100),
        figure: Duration::from_millis(2_010),
    };
    pub(crate) const FULL: Self = Self {
        is_quick: false,
        rounds: 40,
        turn: Duration::from_millis(250),
        figure: Duration::from_secs(10),
    };

    pub(crate) const fn is_quick(self) -> bool {
        self.is_quick
    }

    pub(crate) const fn figure(self) -> Duration {
        self.figure
    }
}

/// What is measured: a name, and how to do a number of checks.
pub(crate) struct Peer<'a> {
    name: &'static str,
    work: Box<Work<'a>>,
}

/// Does so many checks, and says how long they took.
type Work<'a> = dyn FnMut(u64) -> Duration + 'a;

impl<'a> Peer<'a> {
    pub(crate) fn new(name: &'static str, work: impl FnMut(u64) -> Duration + 'a) -> Self {
        Self {
            name,
            work: Box::new(work),
        }
    }

    /// How many checks fill a turn. Warms the peer up on the way.
    fn checks_in(&mut self, turn: Duration) -> u64 {
        let mut checks = 64;
        loop {
            let elapsed = (self.work)(checks);
            if elapsed >= turn / 2 {
                let fitting = turn.as_secs_f64() / elapsed.as_secs_f64() * checks as f64;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "at most twice the checks, and positive"
                )]
                return (fitting as u64).max(1);
            }
            checks *= 2;
        }
    }
}

/// How one peer did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub(crate) peer: &'static str,
    pub(crate) ns_per_check: f64,
    /// To the first peer, round by round.
    pub(crate) ratio: Quartiles,
}

/// The middle of a figure over the rounds, and how far it spreads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quartiles {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

/// Measures the peers, the first of which is what the others are compared to.
pub(crate) fn measure(mut peers: Vec<Peer<'_>>, effort: Effort) -> Vec<Standing> {
    let checks: Vec<u64> = peers
        .iter_mut()
        .map(|peer| peer.checks_in(effort.turn))
        .collect();
    let mut rounds = vec![Vec::with_capacity(effort.rounds); peers.len()];
    for round in 0..effort.rounds {
        // Nobody always comes after the same one, who may leave the disk or the caches busy.
        for turn in 0..peers.len() {
            let place = (round + turn) % peers.len();
            if let (Some(peer), Some(checks), Some(figures)) = (
                peers.get_mut(place),
                checks.get(place),
                rounds.get_mut(place),
            ) {
                let elapsed = (peer.work)(*checks);
                figures.push(elapsed.as_secs_f64() * 1e9 / *checks as f64);
            }
        }
    }
    standings(&peers, &rounds)
}

fn standings(peers: &[Peer<'_>], rounds: &[Vec<f64>]) -> Vec<Standing> {
    let first = rounds.first().map(Vec::as_slice).unwrap_or_default();
    let standing = |(peer, figures): (&Peer<'_>, &Vec<f64>)| Standing {
        peer: peer.name,
        ns_per_check: quartiles(figures.iter().copied()).median,
        ratio: quartiles(figures.iter().zip(first).map(|(own, first)| own / first)),
    };
    peers.iter().zip(rounds).map(standing).collect()
}

fn quartiles(figures: impl Iterator<Item = f64>) -> Quartiles {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let at = |part: usize| {
        let figure = figures.get(figures.len() * part / 4);
        figure.copied().unwrap_or(f64::NAN)
    };
    Quartiles {
        low: at(1),
        median: at(2),
        high: at(3),
    }
}
