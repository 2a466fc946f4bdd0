"""What a recipe costs, predicted before anything is allocated: parameters, FLOPs, memory, bytes on the wire, step time.

`xgram-dist plan` prints it; `train` and `submit` use it to explain that memory runs out.
"""
