"""`lm predict`: the log-probability of every token of some texts."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from lm.data.loader import Batch
from lm.errors import RequestError
from lm.training.callback import Callback
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

SCHEMA = pa.schema(
    [
        ("document", pa.string()),  # where the text came from
        ("start", pa.int64()),  # index of the row's first token in its document
        ("token_ids", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.string())),
        ("log_probs", pa.list_(pa.float32())),  # natural logarithm, given the earlier tokens of the row
    ]
)


class Predictions(Callback):
    """Writes the log-probabilities to Parquet, one row per window of a document."""

    _writer: pq.ParquetWriter

    def on_predict_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.run is None:
            raise RequestError("predict needs a run to write to; name one with --run or --ckpt_path")
        self.path = trainer.run.path / "predictions.parquet"
        self._writer = pq.ParquetWriter(self.path, SCHEMA, compression="zstd")

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LanguageModule, outputs: Tensor, batch: Batch, *args: Any
    ) -> None:
        datamodule = trainer.datamodule
        rows = []
        for log_probs, labels in zip(outputs.float().cpu(), batch.labels.cpu(), strict=True):
            counts = labels != -100
            if not counts.any():  # a row that fills up the last batch
                continue
            document, start = datamodule.predicted.popleft()
            ids = labels[counts].tolist()
            rows.append(
                {
                    "document": document,
                    "start": start,
                    "token_ids": ids,
                    "tokens": [datamodule.tokenizer.decode([token]) for token in ids],
                    "log_probs": log_probs[counts].tolist(),
                }
            )
        self._writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))

    def on_predict_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self._writer.close()
        print(self.path)
