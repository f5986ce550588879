"""A look into a folder of shards: how much it holds, and three held-out examples as words.

    python tests/tools/show.py shards/wiki

After each token that was chosen to be predicted stands, in brackets, what was there before. Which
B follow A is the same in every folder: it is drawn from the numbers of the examples.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import data

SEQ_LEN = 64
EXAMPLES = range(2, 5)         # one whose B follows A, and two whose B does not


def show(folder):
    """Returns the report of data.describe and examples that training never reads, lines of text.
    Raises data.DataError or OSError if the folder holds no shards."""
    report = data.describe(folder)
    report += "\nin brackets: what stood there, to be predicted"
    tokenizer = data.load_tokenizer(Path(folder) / "tokenizer.model")
    dataset = data.PretrainingData(folder, SEQ_LEN, held_out=True)
    batch = dataset.batch(EXAMPLES)

    # The rows of all examples stand one after another; see data.Batch.
    words = tokenizer.id_to_piece(batch.tokens.tolist())
    for row, label in zip(batch.masked_rows.tolist(), batch.labels["mlm"].tolist()):
        if label != data.IGNORED:
            words[row] += f"({tokenizer.id_to_piece(label)})"
    for example, pair_label in enumerate(batch.labels["nsp"]):
        first = batch.bounds[example]
        last = batch.bounds[example + 1]
        report += f"\n\nB follows A: {pair_label == 0}\n    {''.join(words[first:last])}"
    return report.replace("▁", " ")      # SentencePiece writes a space so.


def main():
    """Prints what `show` returns; one line on stderr and status 1 if it cannot."""
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
