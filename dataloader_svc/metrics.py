"""Every loader_* metric, declared once; and how a scrape is read back (for `top`)."""

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from dataloader_svc.tasks import Done
from shared.telemetry import REGISTRY, SECONDS

LEASE_SECONDS = (1e-3, 5e-3, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

READY = Gauge("loader_ready", "1 while batches are served, 0 before and while draining", registry=REGISTRY)
SHARDS = Gauge("loader_shards", "Shards in the index", registry=REGISTRY)
INDEX_SECONDS = Gauge("loader_index_seconds", "Seconds the index took to verify or build at start", registry=REGISTRY)
PADDING = Gauge(
    "loader_padding_ratio",
    "Share of the planned epoch's tokens that is padding: bucketed as served, naive as pad-to-largest would be",
    ["kind"],
    registry=REGISTRY,
)
UNUSED_SLOTS = Gauge(
    "loader_unused_slots_ratio",
    "Share of the planned epoch's image and clip slots that stay empty",
    ["modality"],
    registry=REGISTRY,
)
DROPPED = Gauge(
    "loader_samples_dropped",
    "Good samples that the planned epoch leaves out, as data.batch.leftovers: drop asks",
    registry=REGISTRY,
)
IMBALANCE = Gauge(
    "loader_step_imbalance_ratio",
    "Estimated cost of the most loaded data rank over the mean in the step being filled: balanced as served, or packed",
    ["kind"],
    registry=REGISTRY,
)
DATASET_SHARE = Gauge(
    "loader_dataset_share",
    "Share of the planned epoch's samples that a dataset has: asked by its weight, served as planned",
    ["dataset", "kind"],
    registry=REGISTRY,
)
SLOTS = Gauge("loader_slots", "Shared-memory slots by state", ["state"], registry=REGISTRY)
JOB_SLOTS = Gauge("loader_job_slots", "Shared-memory slots that a job holds", ["job"], registry=REGISTRY)
DEVICE_BYTES = Gauge(
    "loader_device_bytes",
    "GPU memory: lent by readers for pixels, and what decode workers' contexts and decoders took as they warmed up",
    ["use"],
    registry=REGISTRY,
)
GPU_SHARING = Gauge(
    "loader_gpu_sharing",
    "1 for how decode workers share their GPU with a trainer: mps, or time_slices; no series for CPU decode",
    ["how"],
    registry=REGISTRY,
)
CLIENTS = Gauge("loader_clients", "Readers with an open session", registry=REGISTRY)
READER_LAG = Gauge(
    "loader_reader_lag",
    "Filled batches that wait for this reader; the series goes when the reader does",
    ["job", "data_rank", "reader"],
    registry=REGISTRY,
)
BATCHES_SENT = Counter("loader_batches_sent", "Batch messages sent to readers", registry=REGISTRY)
PAYLOAD_BYTES = Counter("loader_payload_bytes", "Bytes of batches sent as frames, not in slots", registry=REGISTRY)
BATCHES_FILLED = Counter("loader_batches_filled", "Micro-batches decoded into a slot", ["group"], registry=REGISTRY)
SAMPLES = Counter("loader_samples", "Samples, images and clips put into slots", ["modality"], registry=REGISTRY)
QUARANTINED = Counter("loader_samples_quarantined", "Verdicts against samples", ["reason"], registry=REGISTRY)
SUBSTITUTED = Counter("loader_samples_substituted", "Bad samples replaced by a spare", registry=REGISTRY)
READ_BYTES = Counter("loader_read_bytes", "Bytes of members read from shards", registry=REGISTRY)
FETCHED_BYTES = Counter(
    "loader_fetched_bytes", "Bytes that decode workers fetched from remote storage", registry=REGISTRY
)
READ_RETRIES = Counter("loader_read_retries", "Remote reads of decode workers that were tried again", registry=REGISTRY)
WORKER_RESTARTS = Counter("loader_worker_restarts", "Decode workers started again", ["cause"], registry=REGISTRY)
REJECTED = Counter(
    "loader_messages_rejected",
    "What was refused: junk, oversize, wrong number of frames, handshakes, keys, and greetings by their code",
    ["reason"],
    registry=REGISTRY,
)
STAGE_SECONDS = Histogram(
    "loader_stage_seconds",
    "Seconds a micro-batch spends in a stage: queue (for a worker), read, decode, assemble, handover (for a reader)",
    ["stage"],
    buckets=SECONDS,
    registry=REGISTRY,
)
HOLD_SECONDS = Histogram(
    "loader_lease_seconds",
    "Seconds from handing a slot to a reader to its release",
    buckets=LEASE_SECONDS,
    registry=REGISTRY,
)


def filled(done: Done, group: str) -> None:
    """Count a filled micro-batch."""
    samples, images, clips = done.counts[:3]
    for modality, count in (("sample", samples), ("image", images), ("audio", clips)):
        SAMPLES.labels(modality).inc(count)
    for stage, seconds in (
        ("read", done.timings.read),
        ("decode", done.timings.decode),
        ("assemble", done.timings.assemble),
    ):
        STAGE_SECONDS.labels(stage).observe(seconds)
    BATCHES_FILLED.labels(group).inc()
    READ_BYTES.inc(done.read_bytes)
    FETCHED_BYTES.inc(done.fetched_bytes)
    READ_RETRIES.inc(done.retries)
    SUBSTITUTED.inc(done.substituted)


Sample = tuple[str, dict[str, str], float]


def parse(text: str) -> list[Sample]:
    """The (name, labels, value) of every sample of a scrape."""
    return [
        (sample.name, dict(sample.labels), float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
