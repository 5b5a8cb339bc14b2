"""Texts in cells."""

from foretoken.lab.certificate.sampled import Cells, tables

SAMPLE = [(1, 2)] * 10 + [(1, 3)] * 5 + [(4, 5)] * 9 + [(6, 7)]


def test_a_text_is_in_the_cell_of_its_longest_frequent_beginning():
    cells = Cells(SAMPLE, share=0.2)  # (), (1,), (1, 2), (1, 3), (4,), (4, 5)
    texts = [(1, 2), (1, 2, 9), (1, 9), (1,), (4, 9), (9, 1), ()]
    assert cells.counts(texts).tolist() == [2, 2, 2, 0, 1, 0]
    assert cells.counts([]).tolist() == [0] * 6


def test_two_samples_by_prompt():
    ((a, b), (c, d)) = tables([SAMPLE, [(0,)]], [[(1, 2)], [(0,), (1,)]], [[(4, 5)], []])
    assert a.sum() == b.sum() == 1 and (a != b).any()
    assert c.tolist() == [1, 1] and d.tolist() == [0, 0]
