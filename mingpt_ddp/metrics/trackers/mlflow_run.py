"""Log a run to MLflow."""

import os
import time
from typing import Any

from mingpt_ddp.config.config import flatten
from mingpt_ddp.config.job import run_name
from mingpt_ddp.metrics.trackers.tracker import Tracker

TAG = "mingpt_ddp.run_id"
MAX_PARAM = 500  # longest value of a parameter that every server accepts, in characters


class MLflowTracker(Tracker):
    """A run in MLflow, which is found by a tag.

    The metrics that are already in MLflow show which step is the next to send.
    """

    name = "mlflow"

    def start(self) -> int:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds, instead of 120
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(self._config.tracker.uri)
        project = self._config.tracker.project
        experiment = client.get_experiment_by_name(project)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(project)
        )
        runs = client.search_runs([experiment_id], filter_string=f"tags.`{TAG}` = '{self._id}'")
        tags = {TAG: self._id}
        run = (
            runs[0]
            if runs
            else client.create_run(experiment_id, None, tags, run_name(self._config))
        )
        self._run = run.info.run_id
        client.update_run(self._run, status="RUNNING")
        new = []
        for key, value in flatten(self._config.to_dict()).items():
            if key not in run.data.params:
                new.append(Param(key, str(value)[:MAX_PARAM]))
        client.log_batch(self._run, params=new)
        steps = [-1]
        for key in run.data.metrics:
            steps += [point.step for point in client.get_metric_history(self._run, key)]
        return max(steps) + 1

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [Metric(key, value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def finish(self, result: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"result.{key}", str(value)) for key, value in result.items()]
        self._client.log_batch(self._run, tags=tags)
        self._client.set_terminated(self._run)
