"""The run in one SQLite file. All SQL of aglite is in this package."""

from aglite.store.records import CallRecord, SampleRecord, StoredCall, StoredSample
from aglite.store.store import Store

__all__ = ["CallRecord", "SampleRecord", "Store", "StoredCall", "StoredSample"]
