"""Shows how much a folder of shards holds, and three of its held-out examples as words.

    python tests/tools/show.py shards/wiki

Each token to predict is followed, in brackets, by the original token. Whether B follows A depends
on the number of the example alone, so it is the same in every folder.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import data

SEQ_LEN = 64
EXAMPLES = range(2, 5)         # in one of them B follows A, in two it does not


def show(folder):
    """Returns, as text, the report of data.describe and examples that training never reads. Raises
    data.DataError or OSError if the folder holds no shards, or damaged ones."""
    data.verify(folder)
    report = data.describe(folder)
    report += "\nin brackets: what stood there, to be predicted"
    tokenizer = data.load_tokenizer(Path(folder) / "tokenizer.model")
    dataset = data.PretrainingData(folder, SEQ_LEN, held_out=True)
    batch = dataset.batch(EXAMPLES)

    # The batch has the rows of one example after another, see data.Batch.
    words = tokenizer.id_to_piece(batch.tokens.tolist())
    for row, label in zip(batch.masked_rows.tolist(), batch.labels["mlm"].tolist()):
        if label != data.IGNORED:
            words[row] += f"({tokenizer.id_to_piece(label)})"
    for example, pair_label in enumerate(batch.labels["nsp"]):
        first = batch.bounds[example]
        last = batch.bounds[example + 1]
        report += f"\n\nB follows A: {pair_label == 0}\n    {''.join(words[first:last])}"
    return report.replace("▁", " ")      # SentencePiece's sign for a space


def main():
    """Prints the text of `show`. An error is one line on stderr and status 1."""
    parser = data.Parser(description="Look into a folder of shards.")
    parser.add_argument("folder", type=data.path_of, help="a folder that data.py has made")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")        # for terminals without UTF-8
    try:
        print(show(args.folder))
    except (data.DataError, OSError) as error:
        sys.exit(f"show.py: {error}")


if __name__ == "__main__":
    main()
