"""Triton kernels, for CUDA and ROCm devices: each row is read once and written once.

===================  ==========================================================================================
file                 what is in it
===================  ==========================================================================================
``launch``           tensors as rows, sizes of blocks, and the one call through which every kernel is started
``arithmetic``       powers, logarithms and Newton's step, shared by all kernels
``solvers``          the solution of one block of rows that is in registers
``places``           which entries a program works on, how it reads them, and lists of those that matter
``rows``             maps and class losses of rows
``products``         Jacobian products, and the derivative in alpha
``boxes``            rows with bounds and a budget
``wide``             maps of rows that do not fit into registers; ``wide_products`` and ``wide_boxes``: the same
``choices``            smoothed choices at the nodes of dynamic programs
``chains``             chains of states: value, expected path, Hessian-vector products
``alignments``         alignments of two series: the same
``attention``        attention without a matrix of weights, and its backward pass in ``attention_backward``
===================  ==========================================================================================

No kernel waits for the host, and none returns anything to it but tensors: sizes of grids follow from shapes, and alpha
may be a tensor on the device. So CUDA graphs can capture them, once a first call has compiled them; all memory that
they use is allocated by torch, from the pool of the graph.

Programs share no memory, except where a comment says so. Within a program Triton inserts the barriers that reductions
need. A barrier that orders stores to global memory before loads by other threads of the same program is written out,
with the reason beside it. That it does order them is what Nvidia's ``bar.sync`` promises. On AMD's devices
``s_barrier`` does not wait for stores, but the requests of a work-group pass through the cache of its compute unit in
the order in which they were made; LLVM's memory model for gfx942 asks for no wait either, unless work-groups are split.

``FENCHEL_KERNELS=triton`` sends tensors of the CPU here too: with ``TRITON_INTERPRET=1`` Triton's interpreter runs the
kernels, which is how they are tested without a device.
"""
