"""TensorBoard's event files, by its own writer."""

from __future__ import annotations

import os
from pathlib import Path

from aglite.tracking.missing import library
from aglite.tracking.points import About, Point


class TensorBoard:
    keeps = False

    def __init__(self, folder: Path) -> None:
        library("tensorboard")
        self._folder = folder

    def open(self, run: About, generation: int, fresh: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        for old in self._folder.glob("events.out.tfevents.*"):
            os.truncate(old, 0)  # a TensorBoard that reads it would not look for the next one if it were gone
        self._writer = EventFileWriter(str(self._folder))
        # and forgets what it has read, from step 0 on
        self._writer.add_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))

    def write(self, point: Point) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._writer.add_event(Event(step=point.step, wall_time=point.at, summary=Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
