"""Do the intervals of a scan to a stated precision hold, and how much work does it save?

    python docs/benchmarks/precision.py coverage [--rows ID OOD] [--reps 1000]
    python docs/benchmarks/precision.py time --model FOLDER --task mnli --path FILE [--train FILE]
    python docs/benchmarks/precision.py work --stored FILE

- coverage: an exact scan of the organism and the derivatives of its rows are made once. Then scans
  to a precision, and searches for the largest effects, are replayed from these numbers with many
  seeds, by the very code that `hc.scan` and `hc.top` run, and compared with the exact scan.
- time: one scan to a precision of 0.02 and one search on a checkpoint, by the clock, with the
  processor time of an exact scan of some of the same rows, batched in the same way, beside it.
- work: as coverage, from an exact scan and derivatives in a file (`save`), for a range of precisions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import hc_lens as hc
from hc_lens.metrics import ACCURACY, AGREEMENT, KL, LOGIT
from hc_lens.scans.sampler import Learned, Sampler
from hc_lens.scans.scan import ScanJob

TARGETS = (LOGIT, KL, ACCURACY, AGREEMENT)


class Replayed(Sampler):
    """Measures by looking up what was measured before; what it learned is there already."""

    learned: Learned
    exact: Mapping[str, np.ndarray]

    def _learn(self, rows) -> Learned:
        return self.learned.of(rows)

    def _measure(self, sets, parts) -> None:
        effects = self.exact[self.target.name]
        for population, start, stop in parts:
            rows = population.rows[start:stop]
            for index in sets:
                population.effects[index][start:stop] = effects[index, rows]
            self.evaluations += len(sets) * (stop - start)


def replayed(model, batches, means, of: str, rows: hc.ScanRows) -> Replayed:
    """A sampler that knows the exact effects of all rows of a scan, and derivatives."""
    job = ScanJob(model, {"rows": batches}, means, None, progress=False)
    (sampler,) = job.samplers(of, lambda n: None).values()
    made = Replayed(
        **{name: getattr(sampler, name) for name in Sampler.__dataclass_fields__},
    )
    everything = np.arange(batches.n_rows)
    made.learned = sampler._learn(everything)
    made.exact = effects_of(rows)
    return made


def effects_of(rows: hc.ScanRows) -> dict[str, np.ndarray]:
    """The effects of all sets on all rows, for each target."""
    right, logit = rows.correct.astype(float), rows.logit
    return {
        LOGIT: logit[1:] - logit[:1],
        ACCURACY: right[1:] - right[:1],
        KL: rows.kl[1:],
        AGREEMENT: rows.agreement[1:].astype(float),
    }
