"""An excerpt of the accuracies that the Heuristic Core's public repository comes with.

Source: https://github.com/princeton-nlp/Heuristic-Core at 3819bb9, ``data/eval``. Of
``mnli-sparsity-grid-acc.json`` and ``mnli-acc_over_ft.json`` it is step 30500, of
``qqp-sparsity-grid-acc.json`` and ``qqp-acc_over_ft.json`` step 9500, with all seeds and
sparsities, rounded to six digits. -1 stands for a run that is missing, as it does there.
"""

from __future__ import annotations

import math

import pandas as pd

MNLI_CASES = {
    "validation_matched": "id",
    "validation_mismatched": "id",
    "lexical_overlap_ln_preposition": "ood",
    "lexical_overlap_ln_subject-object_swap": "ood",
    "constituent_cn_embedded_under_if": "ood",
    "constituent_cn_embedded_under_verb": "ood",
}
MNLI_FULL = (0.832807, 0.838487, 0.632, 0.725, 0.064, 0.139)
MNLI = """
42  5 0.809577 0.814178 0.029 0.002 0.002 0.000
42 10 0.833113 0.838588 0.597 0.672 0.073 0.124
42 15 0.834743 0.835130 0.524 0.555 0.068 0.101
42 20 0.833214 0.836554 0.531 0.627 0.088 0.100
42 25 0.832399 0.832791 0.589 0.612 0.091 0.137
42 30 0.827407 0.827604 0.331 0.279 0.101 0.010
42 35 0.824045 0.825875 0.460 0.408 0.158 0.039
42 40 0.825777 0.824349 0.309 0.201 0.092 0.040
42 45 0.817626 0.822010 0.216 0.159 0.027 0.007
42 50 0.812124 0.811534 0.033 0.010 0.032 0.000
42 55 0.801324 0.803804 0.007 0.001 0.044 0.000
42 60 0.794498 0.793226 0.002 0.000 0.021 0.000
42 65 0.768721 0.775936 0.000 0.000 0.000 0.000
42 70 0.751197 0.757221 0.000 0.000 0.014 0.000
43  5 0.811105 0.809703 0.031 0.007 0.016 0.001
43 10 0.831992 0.838080 0.611 0.672 0.108 0.127
43 15 0.837799 0.837368 0.467 0.473 0.105 0.025
43 20 0.828426 0.831977 0.424 0.476 0.038 0.036
43 25 0.831788 0.829740 0.462 0.458 0.188 0.167
43 30 0.830260 0.829333 0.612 0.647 0.154 0.109
43 35 0.825166 0.826790 0.348 0.233 0.103 0.072
43 40 -1 -1 -1 -1 -1 -1
43 45 0.817932 0.822620 0.178 0.072 0.062 0.003
43 50 0.811513 0.811941 0.068 0.031 0.017 0.004
43 55 0.798981 0.804007 0.016 0.004 0.021 0.000
43 60 0.791136 0.792209 0.003 0.000 0.022 0.000
43 65 0.777585 0.779089 0.002 0.000 0.007 0.000
43 70 0.754967 0.758849 0.000 0.000 0.028 0.000
44  5 0.814875 0.817738 0.009 0.000 0.040 0.002
44 10 0.833520 0.837368 0.621 0.703 0.049 0.110
44 15 0.832807 0.837063 0.580 0.649 0.084 0.100
44 20 0.833011 0.832282 0.466 0.494 0.026 0.051
44 25 0.832399 0.835639 0.558 0.583 0.091 0.042
44 30 0.826592 0.828214 0.495 0.485 0.127 0.056
44 35 0.826083 0.826485 0.287 0.251 0.072 0.021
44 40 0.821701 0.824959 0.419 0.344 0.102 0.024
44 45 0.817015 0.816212 0.106 0.058 0.015 0.000
44 50 0.815079 0.816416 0.140 0.082 0.021 0.012
44 55 0.809272 0.812449 0.022 0.012 0.060 0.000
44 60 0.792155 0.795362 0.001 0.000 0.010 0.000
44 65 0.776261 0.782242 0.000 0.000 0.000 0.000
44 70 0.743250 0.754373 0.000 0.000 0.000 0.000
"""
QQP_CASES = {"qqp": "id", "paws-qqp_0": "ood"}
QQP_FULL = (0.906604, 0.139374)
QQP = """
42  5 0.882884 0.016099
42 10 0.906777 0.096596
42 15 0.905120 0.113040
42 20 0.903760 0.087397
42 25 -1 -1
42 30 0.900198 0.058878
42 35 0.895820 0.024954
42 40 0.892580 0.015869
42 45 -1 -1
42 50 -1 -1
42 55 0.873238 0.011385
42 60 0.856072 0.014029
42 65 0.843532 0.009430
43  5 0.875489 0.010465
43 10 0.906975 0.114995
43 15 0.905491 0.077852
43 20 0.902869 0.091996
43 25 -1 -1
43 30 0.902473 0.051058
43 35 0.893742 0.021159
43 40 0.894385 0.025069
43 45 0.886891 0.018744
43 50 0.879174 0.009430
43 55 0.874771 0.011615
43 60 0.856740 0.005060
43 65 0.839080 0.009085
44  5 0.875439 0.012534
44 10 0.905763 0.099126
44 15 0.906208 0.083947
44 20 0.903982 0.090041
44 25 0.903413 0.052898
44 30 0.899307 0.043583
44 35 0.896686 0.030819
44 40 0.890601 0.018054
44 45 0.889191 0.015294
44 50 0.880509 0.009890
44 55 0.871308 0.009890
44 60 0.853945 0.006670
44 65 0.839624 0.009545
"""

Grid = dict[tuple[int, int], dict[str, float]]
"""Accuracy by (seed, percent of sparsity) and case."""


def grid(text: str, cases: dict[str, str]) -> Grid:
    """The accuracies of an excerpt; -1 where a run is missing."""
    lines = [line.split() for line in text.strip().splitlines()]
    return {
        (int(seed), int(percent)): dict(zip(cases, map(float, values), strict=True))
        for seed, percent, *values in lines
    }


def tables(text: str, cases: dict[str, str], full: tuple[float, ...]) -> list[pd.DataFrame]:
    """The excerpt as a table of runs and one of full models; NaN where a run is missing."""
    runs = [
        ("step", percent / 100, seed, cases[case], case, math.nan if value == -1 else value)
        for (seed, percent), by_case in grid(text, cases).items()
        for case, value in by_case.items()
    ]
    whole = [("step", cases[case], case, value) for case, value in zip(cases, full, strict=True)]
    names = ["checkpoint", "sparsity", "seed", "dataset", "case", "accuracy"]
    return [
        pd.DataFrame(runs, columns=names),
        pd.DataFrame(whole, columns=["checkpoint", *names[3:]]),
    ]


def by_brute_force(
    text: str, cases: dict[str, str], full: tuple[float, ...], target: str, margin: float
) -> list[float]:
    """The size of each seed by the rules of the plotting script, with a plain loop.

    From the largest sparsity down, the first whose mean over the cases is above the full model's
    minus the margin; none of them is a size of 100.
    """
    wanted = [case for case, dataset in cases.items() if target in (dataset, "mix")]
    whole = dict(zip(cases, full, strict=True))
    bound = sum(whole[case] for case in wanted) / len(wanted) - margin
    accuracies, sizes = grid(text, cases), []
    for seed in sorted({seed for seed, _ in accuracies}):
        size = 100
        for percent in sorted({percent for _, percent in accuracies}, reverse=True):
            values = [accuracies[seed, percent][case] for case in wanted]
            if sum(values) / len(values) > bound:
                size = 100 - percent
                break
        sizes.append(size)
    return sizes
