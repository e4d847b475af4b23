"""Stage 1: it trains, but the loss starts in the hundreds.

python exercises/stage1_broken_loss.py --batch-size 8 --seq-len 128 --num-steps 20
"""

from common import main


def init_weights(model):
    # Symptom: the first loss is far above ln(1000).
    pass


if __name__ == "__main__":
    main(init_weights=init_weights)
