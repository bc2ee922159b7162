"""Load the organism and evaluate every case.

time python docs/examples/evaluate_organism.py
"""

from __future__ import annotations

import hc_lens as hc


def main() -> None:
    """Print the accuracy of every case."""
    model = hc.organism.load()
    data = {
        "id": hc.organism.task().batches(model, "validation"),
        "ood": hc.organism.task("ood").batches(model),
    }
    table = hc.evaluate(model, data, progress=False)
    print(table[["dataset", "case", "n", "accuracy"]].to_string(index=False))


if __name__ == "__main__":
    main()
