"""Quantizes a model to 4 bits as ONNX Runtime's own tool does: quantize_onnxruntime.py MODEL.onnx BLOCK OUT.onnx"""

import sys

from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer


def main():
    model, block, out = sys.argv[1:4]
    quantizer = MatMulNBitsQuantizer(model, bits=4, block_size=int(block), is_symmetric=True, op_types_to_quantize=("MatMul",))
    quantizer.process()
    quantizer.model.save_model_to_file(out, use_external_data_format=True)


main()
