"""A scrape shows the same lines as prometheus_client's own histogram."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from engine.metrics.quick_histogram import QuickHistogram

BOUNDS = (0.005, 0.5, 1, 60)


def test_its_lines_are_those_of_the_usual_histogram():
    texts = []
    for kind in (Histogram, QuickHistogram):
        registry = CollectorRegistry()
        histogram = kind("gap_seconds", "Seconds between two tokens.", buckets=BOUNDS, registry=registry)
        for value in (0.0, 0.005, 0.0051, 0.7, 1.0, 3.25, 61.5):
            histogram.observe(value)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created" not in line])  # the time of the histogram's creation
    assert texts[0] == texts[1]
