"""Names of operations that are jointly linear in all arguments that depend on the input: DeepLIFT needs no rule.

These are operations that move values, and sums and weighted sums with constant weights. Operations that are linear only
for some arguments (a product with a constant) are in `deeplift_operators.py`.
"""


def _split_names(text: str) -> frozenset[str]:
    """Split a list of names at whitespace."""
    return frozenset(text.split())


#: Views, copies, selections by constant indices and masks, and other ways to store the same numbers.
LINEAR_MOVEMENT_OPS = _split_names("""
    view reshape view_as reshape_as flatten unflatten ravel squeeze squeeze_ unsqueeze unsqueeze_ contiguous alias
    as_strided positive permute transpose transpose_ t t_ adjoint swapaxes swapdims movedim moveaxis roll flip rot90
    diagonal unfold fold expand expand_as broadcast_to broadcast_tensors repeat repeat_interleave tile meshgrid
    split split_with_sizes tensor_split chunk unbind cat concat stack hstack vstack dstack column_stack
    __getitem__ select narrow index_select gather take_along_dim masked_select where masked_fill masked_fill_
    masked_scatter masked_scatter_ pad tril triu pixel_shuffle pixel_unshuffle index_fill index_put index_put_
    index_copy index_copy_ scatter scatter_ copy_ clone to type type_as float double half bfloat16 cpu cuda
    __get__ __set__ __iter__ requires_grad_ register_hook retain_grad real imag view_as_complex view_as_real
""")
LINEAR_SUM_OPS = _split_names("""
    add __add__ __radd__ sub __sub__ __rsub__ subtract rsub neg negative __neg__ mean sum cumsum diff
    index_add index_add_ scatter_add scatter_add_ avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d
    interpolate
""")
LINEAR_OPS = LINEAR_MOVEMENT_OPS | LINEAR_SUM_OPS
