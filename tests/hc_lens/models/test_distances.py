"""Buckets of distances against Hugging Face's, and the bias of every pair against its formula."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from hc_lens.models.distances import Bucketed, Disentangled, log_bucket, skew, t5_bucket

FAR = torch.arange(-700, 701)


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (4, 40), (32, 128), (8, 9)])
def test_the_buckets_of_deberta_are_hugging_faces(buckets: int, farthest: int):
    expected = make_log_bucket_position(FAR, buckets, farthest).long()
    assert torch.equal(log_bucket(FAR, buckets, farthest), expected)


def test_without_buckets_a_distance_is_its_own():
    assert torch.equal(log_bucket(FAR, -1, 512), FAR)


def test_the_buckets_of_mpnet_are_hugging_faces():
    assert torch.equal(t5_bucket(FAR), MPNetEncoder.relative_position_bucket(FAR))


def test_a_table_by_offset_is_read_by_query_and_key():
    by_offset = torch.tensor([[1.0, 2.0, 3.0, 0.0], [4.0, 5.0, 6.0, 0.0]])
    # Query 0 has its keys at the offsets 0 and 1, query 1 at -1 and 0.
    assert skew(by_offset).tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert skew(torch.tensor([[7.0, 8.0]])).tolist() == [[7.0]]


def number(distances: torch.Tensor) -> torch.Tensor:
    """A table of one head of width 1: the row of a distance is 10 more than it."""
    return (distances + 10.0)[None, :, None]


def test_both_terms_of_deberta_are_those_of_the_distance_of_query_from_key():
    q = torch.tensor([2.0, 3.0, 5.0]).view(1, 3, 1, 1)
    k = torch.tensor([7.0, 11.0, 13.0]).view(1, 3, 1, 1)
    got = Disentangled(4.0, number, lambda distance: 100 * number(distance))(q, k)[0, 0]
    expected = [
        [(q[0, i, 0, 0] + 100 * k[0, j, 0, 0]) * (10 + i - j) / 4 for j in range(3)]
        for i in range(3)
    ]
    torch.testing.assert_close(got, torch.tensor(expected))


@pytest.mark.parametrize("made", ["disentangled", "keys", "queries", "bucketed"])
def test_one_query_of_a_row_gets_what_it_gets_among_all(made: str):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 6, 2, 3, generator=generator) for _ in "qk")
    table = torch.randn(32, 2, generator=generator)

    def project(distance: torch.Tensor) -> torch.Tensor:
        return table[distance + 10].T[:, :, None] * torch.tensor([1.0, -2.0, 0.5])

    bias = {
        "disentangled": Disentangled(2.0, project, lambda distance: project(distance).cos()),
        "keys": Disentangled(2.0, project, None),
        "queries": Disentangled(2.0, None, project),
        "bucketed": Bucketed(table),
    }[made]
    at = torch.tensor([5, 2])  # of a batch of two rows, stacked twice
    rows = torch.arange(4)
    everywhere = bias(q, k).expand(4, -1, -1, -1)[rows, :, at.repeat(2)]
    alone = bias(q[rows, at.repeat(2)][:, None], k, at)
    torch.testing.assert_close(alone.expand(4, -1, -1, -1)[:, :, 0], everywhere)


def test_tables_of_the_last_length_are_kept_where_the_weights_are_fixed():
    lengths: list[int] = []

    def project(distance: torch.Tensor) -> torch.Tensor:
        lengths.append(len(distance) // 2)
        return number(distance)

    bias = Disentangled(1.0, project, None, keep=True)
    for length in (3, 3, 2, 3):
        rows = torch.ones(1, length, 1, 1)
        bias(rows, rows)
    assert lengths == [3, 2, 3]
