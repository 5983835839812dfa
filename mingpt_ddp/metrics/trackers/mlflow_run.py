"""A run in MLflow."""

import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.metrics.trackers.outbox import Points
from mingpt_ddp.storage.run_dir import run_name

TAG = "mingpt_ddp.run_id"
MAX_METRICS = 1000  # per request, as the server allows
MAX_PARAMS = 100  # likewise
MAX_TEXT = 5000  # characters of a tag


class MLflowTracker:
    """The run is found by a tag. A metric of a step is sent if the run's history lacks it."""

    name = "mlflow"

    def __init__(self, config: Config, directory: Path, run_id: str) -> None:
        self._config = config
        self._id = run_id
        self._uri = config.tracker.uri or os.environ.get("MLFLOW_TRACKING_URI")
        self.is_remote = urlsplit(self._uri or "").scheme in ("http", "https", "databricks")

    def load(self) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds, of 120
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._entities = entities
        self._client_of = MlflowClient

    def connect(self) -> None:
        self._client = self._client_of(self._uri)
        name = run_name(self._config)
        project = self._config.tracker.project
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        found = self._client.search_runs([number], filter_string=f"tags.`{TAG}` = '{self._id}'")
        if found:
            run = found[0]
        else:
            run = self._client.create_run(number, run_name=name, tags={TAG: self._id})
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        new = []
        for key, value in flatten(self._config.to_dict()).items():
            if key not in run.data.params:
                new.append(self._entities.Param(key, str(value)[:500]))
        for begin in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self._run, params=new[begin : begin + MAX_PARAMS])
        self._tags = run.data.tags
        self._sent = set()
        for key in run.data.metrics:
            for point in self._client.get_metric_history(self._run, key):
                self._sent.add((key, point.step))

    def send(self, points: Points) -> None:
        now = int(1000 * time.time())
        new = []
        for step, metrics in points:
            for key, value in metrics.items():
                if key != "sample" and (key, step) not in self._sent:
                    new.append(self._entities.Metric(key, value, now, step))
        for begin in range(0, len(new), MAX_METRICS):
            self._client.log_batch(self._run, metrics=new[begin : begin + MAX_METRICS])
        for step, metrics in points:
            tag = f"sample.{step:08d}"
            if "sample" in metrics and tag not in self._tags:
                self._client.set_tag(self._run, tag, metrics["sample"][:MAX_TEXT])

    def finish(self, result: dict[str, Any]) -> None:
        for key, value in result.items():
            self._client.set_tag(self._run, f"result.{key}", str(value))
        self._client.set_terminated(self._run)
