"""Stage 5: nothing is replaced. Triton for what is bound by memory, cuBLAS for products, the step replayed from CUDA graphs.

python exercises/stage5_optimized.py --batch-size 8 --seq-len 128 --num-steps 20
"""

from common import main

if __name__ == "__main__":
    main()
