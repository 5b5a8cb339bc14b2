"""Decoders on ONNX Runtime: a graph of few large operations, written from a network's modules, over
keys and values that stay where they are. It does not know how a runtime is chosen.
"""

import os

# Its wheels report their use to Microsoft and write an id of the device, unless this is set before
# they are imported; who has set it otherwise keeps that
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
