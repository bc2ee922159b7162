"""A first session: load the organism, see where it fails, remove a head.

python docs/examples/first_session.py
"""

from __future__ import annotations

import hc_lens as hc


def main() -> None:
    """Print the units, the accuracy of every case, and what one head is for."""
    model = hc.organism.load()
    space = hc.UnitSpace.of(model)
    print(f"{type(model).__name__} with {space}, labels {list(model.labels.values())}")
    print(", ".join(space.labels))

    task, ood = hc.organism.task(), hc.organism.task("ood")
    data = {
        "id": task.batches(model, "validation", limit=500),
        "ood": ood.batches(model, limit=1600),
    }
    means = hc.collect_means(model, task.batches(model, "train", limit=2000), progress=False)
    full = hc.evaluate(model, data, progress=False)
    print("\nAccuracy of the full model, case by case (KL and agreement are with itself):")
    print(full.drop(columns="subnetwork").round(3).to_string(index=False))

    scan = hc.scan(model, data, means, progress=False)
    hypothetical = scan[(scan["dataset"] == "ood") & (scan["case"] == "embedded_if")]
    worst = hypothetical.sort_values("accuracy_change").iloc[0]
    spared = scan[(scan["set"] == worst["set"]) & (scan["dataset"] == "id")].iloc[0]
    print(
        f"\nMean-ablating {worst['set']} changes the accuracy on 'embedded_if' by "
        f"{100 * worst['accuracy_change']:+.1f} points, in domain by "
        f"{100 * spared['accuracy_change']:+.1f}."
    )


if __name__ == "__main__":
    main()
