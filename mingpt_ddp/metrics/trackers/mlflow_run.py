"""A run in MLflow."""

import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.metrics.trackers.outbox import Points
from mingpt_ddp.storage.run_directory import run_name

TAG = "mingpt_ddp.run_id"
MAX_PARAM = 500  # characters, as any server allows


class MLflowTracker:
    """The run is found by a tag. A metric of a step is sent if the run's history lacks it."""

    name = "mlflow"

    def __init__(self, config: Config, directory: Path, run_id: str) -> None:
        self._config = config
        self._id = run_id
        self._uri = config.tracker.uri or os.environ.get("MLFLOW_TRACKING_URI")
        self.is_remote = urlsplit(self._uri or "").scheme in ("http", "https", "databricks")

    def find_run(self) -> int:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds, of 120
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._uri)
        name = run_name(self._config)
        project = self._config.tracker.project
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        runs = self._client.search_runs([number], filter_string=f"tags.`{TAG}` = '{self._id}'")
        if runs:
            run = runs[0]
        else:
            run = self._client.create_run(number, run_name=name, tags={TAG: self._id})
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        new = []
        for key, value in flatten(self._config.to_dict()).items():
            if key not in run.data.params:
                new.append(Param(key, str(value)[:MAX_PARAM]))
        self._client.log_batch(self._run, params=new)
        self._sent = set()
        for key in run.data.metrics:
            for point in self._client.get_metric_history(self._run, key):
                self._sent.add((key, point.step))
        return 0  # of a step some values may be missing

    def send(self, points: Points) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = []
        for step, values in points:
            for key, value in values.items():
                if (key, step) not in self._sent:
                    metrics.append(Metric(key, value, now, step))
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, result: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"result.{key}", str(value)) for key, value in result.items()]
        self._client.log_batch(self._run, tags=tags)
        self._client.set_terminated(self._run)
