"""Every trainer_* metric, declared once. Times are in seconds; counters are of this process alone."""

from prometheus_client import Counter, Gauge, Histogram

from shared.telemetry import REGISTRY, SECONDS

DATA_WAIT_SECONDS = Histogram(
    "trainer_data_wait_seconds", "Seconds a step waited for a micro-batch", buckets=SECONDS, registry=REGISTRY
)
PREPROCESS_SECONDS = Histogram(
    "trainer_preprocess_seconds",
    "Seconds of host time to copy and transform a micro-batch (on CUDA: to queue that)",
    buckets=SECONDS,
    registry=REGISTRY,
)
STEP_SECONDS = Histogram(
    "trainer_step_seconds", "Seconds from one optimizer step to the next", buckets=SECONDS, registry=REGISTRY
)
CHECKPOINT_SECONDS = Histogram(
    "trainer_checkpoint_seconds",
    "Seconds that training stood still for a checkpoint",
    buckets=SECONDS,
    registry=REGISTRY,
)
CHECKPOINT_WRITE_SECONDS = Histogram(
    "trainer_checkpoint_write_seconds",
    "Seconds to write and sync this rank's share of a checkpoint",
    buckets=SECONDS,
    registry=REGISTRY,
)
TOKENS = Counter("trainer_tokens", "Tokens trained on, without padding", registry=REGISTRY)
SAMPLES = Counter("trainer_samples", "Samples trained on", registry=REGISTRY)
RECONNECTS = Gauge("trainer_reconnects", "Sessions with a loader opened after the first", registry=REGISTRY)
JUNK = Gauge(
    "trainer_loader_junk", "Messages from a loader that were none, or not whole, and dropped", registry=REGISTRY
)
LOSS = Gauge("trainer_loss", "Loss of the last step, over the global batch", registry=REGISTRY)
GRAD_NORM = Gauge("trainer_grad_norm", "Gradient norm of the last step, before clipping", registry=REGISTRY)
STEPS_SKIPPED = Counter(
    "trainer_steps_skipped", "Steps that changed nothing: loss or gradient norm not finite", registry=REGISTRY
)
STEP = Gauge("trainer_step", "Global steps finished", registry=REGISTRY)
EXPERT_BALANCE_LOSS = Gauge(
    "trainer_expert_balance_loss", "Balance loss of the last step, before its coefficient; 1: even", registry=REGISTRY
)
ROUTER_Z_LOSS = Gauge("trainer_router_z_loss", "Router z-loss of the last step", registry=REGISTRY)
EXPERT_DROPPED_SHARE = Gauge(
    "trainer_expert_dropped_share", "Share of assignments that full experts dropped, last step", registry=REGISTRY
)
EXPERT_LOAD = Gauge(
    "trainer_expert_load",
    "Share of a block's assignments that an expert was asked for, last step; blocks with experts counted from 0",
    ["block", "expert"],
    registry=REGISTRY,
)
