# ruff: noqa: E501  (a pattern is one line)
"""Survivors that are no gap in the tests, each with the reason.

A reason belongs to a function and to the changes that match a pattern. A survivor without a reason fails the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reliability.mutants.mutant import Mutant
from reliability.mutants.results import shown

EQUIVALENT = "equivalent"  # no input can tell it from the original
PERFORMANCE = "performance"  # the same result, faster or slower, or with more or less memory
PLATFORM = "platform"  # needs hardware or a system that the tests do not have
TUNING = "tuning"  # a start value or a heuristic: another value is as right


@dataclass(frozen=True)
class Reason:
    """Why the mutants of a function, or some of them, need not be noticed."""

    path: str
    function: str
    change: str  # a regular expression, searched in "old → new"
    kind: str
    why: str


_ATTENTION, _SCHEMES = "src/locant/attention/", "src/locant/schemes/"
_EXPERIMENTS, _RUNS, _HF = "src/locant/experiments/", "src/locant/runs/", "src/locant/hf/"
_TWO_DIMENSIONS = "Positions and rows of keys have two dimensions, so the dimensions −1 and +1 are the same."
_DEVICE = "The tests run on a CPU, where None is the same device."
_MEMORY = "It limits how much is computed at a time. Any limit gives the same result, with another need of memory."
_SYMMETRIC = "A normal distribution is symmetric, so plus and minus draw from the same one."
_VERBOSE = "It decides whether a tokenizer warns, and nothing else."
_GRID = "The grid from which a fit starts. Fitting goes on from there, and a neighbouring grid is as right."

REASONS: tuple[Reason, ...] = (
    # ---- build
    Reason(_ATTENTION + "build.py", "build", r'→ if os\.environ\.get\("LOCANT_FUSED", (None|"XX1XX")?\)', EQUIVALENT,
           'The default is compared with "0" alone, so any other default is the same.'),
    Reason(_ATTENTION + "build.py", "build", r'^trouble = "" → trouble = None$', EQUIVALENT,
           "It is read only after an error has replaced it: OPTIONAL is not empty."),
    Reason(_ATTENTION + "build.py", "_load", r"\[:21\]", EQUIVALENT,
           "One digit more in the name of a file. A name must only differ from build to build."),
    Reason(_ATTENTION + "build.py", "_load_uncached", r'→ with tempfile\.TemporaryDirectory\((prefix=(None|"XXlocant-XX"))?\)',
           EQUIVALENT, "The name of a folder that is deleted before anybody can read it."),
    Reason(_ATTENTION + "build.py", "_key", r"→ key = secrets\.token_bytes\(None\)$", EQUIVALENT,
           "The standard library's own default is 32 bytes, and a key of another length would be made again at every use."),
    # ---- attend, choice, diagnosis, request
    Reason(_ATTENTION + "attend.py", "attend", r"(isinstance\(None, Tensor\)|\(isinstance\(q, Tensor\)\) and False) else \"cpu\"$", PLATFORM,
           "The type of the device for autocast: the tests run on a CPU."),
    Reason(_ATTENTION + "attend.py", "attend", r"\(isinstance\(q, Tensor\)\) or True else|XXcpuXX", EQUIVALENT,
           "What is not a tensor raises either way."),
    Reason(_ATTENTION + "diagnosis.py", "choices", r"→ kind = (None$|\"XXcudaXX\"|\"cuda\" if .* and False)", PLATFORM, _DEVICE),
    Reason(_ATTENTION + "diagnosis.py", "_diagnose_kernel", r"XXnoneXX", EQUIVALENT, "The wording of a line for a reader."),
    Reason(_ATTENTION + "request.py", "_rotate", r"\"XX(queries|keys)XX\"", EQUIVALENT, "The wording of an error."),
    Reason(_ATTENTION + "request.py", "_rotate", r"(not scheme\.rotates and|q\.shape\[1\] == 0 or)", PERFORMANCE,
           "What need not be rotated is rotated by nothing, or has no entries."),
    Reason(_ATTENTION + "request.py", "prepare", r"bias \+ inside, \)$", EQUIVALENT,
           "The score is part of the bias from here on, and no back end reads it."),
    Reason(_ATTENTION + "diagnosis.py", "choices", r"\.to\(None\)", PLATFORM, _DEVICE),
    Reason(_ATTENTION + "diagnosis.py", "choices", r"→ built = scheme\(spec, n_heads=2, head_dim=16, (d_model=(None|33))?\)", EQUIVALENT,
           "None of the six schemes in the table of the doctor depends on d_model."),
    Reason(_ATTENTION + "request.py", "prepare", r"_check_terms\(terms, None,", EQUIVALENT,
           "Only the wording of errors contains the scheme, which is their rule in exclusions.py."),
    Reason(_ATTENTION + "choice.py", "fused_unsupported", r"→ if 0 in \(request\.k\.shape\[3\],|→ if 0 in .*request\.k\.shape\[2\]\):$", EQUIVALENT,
           "_check_tensors has refused calls without keys, heads or head size; only the size of the values can be 0 here."),
    # ---- eager
    Reason(_ATTENTION + "eager.py", "(module)", r"^CHUNK = 2\*\*24 → CHUNK = (2 \* 24|3\*\*24|2\*\*25)$", PERFORMANCE, _MEMORY),
    Reason(_ATTENTION + "eager.py", "attend", r"→ recompute = len\(slices\) (>= 1|> 2) and", PERFORMANCE,
           "Slices that are computed again give the same gradients as slices that are stored."),
    Reason(_ATTENTION + "eager.py", "attend_rows", r"masked_fill\(nothing, 1\.0\)\.softmax", EQUIVALENT,
           "Rows of equal logits, whatever they are, have equal weights, which become 0 in the same line."),
    Reason(_ATTENTION + "eager.py", "_vector_logits", r"→ total = _plus\(None, by_offset\.gather\(-1", EQUIVALENT,
           "It is the first term, so the total is None."),
    Reason(_ATTENTION + "eager.py", "added_logits", r"→ total = _plus\(None, terms\.bias", EQUIVALENT,
           "It is the first term, so the total is None."),
    Reason(_ATTENTION + "eager.py", "attend_rows", r"→ if request\.offsets\.inverse is None:", PERFORMANCE,
           "A product for each pair and a product for each offset give the same output."),
    Reason(_ATTENTION + "eager.py", "attend_rows", r"if \(request\.dropout\) or True else weight$", PERFORMANCE,
           "A dropout of 0 copies the weights."),
    Reason(_ATTENTION + "eager.py", "_vector_logits", r"by_offset\.gather\(\+2,", EQUIVALENT,
           "It has four dimensions, so the dimensions −2 and +2 are the same."),
    Reason(_ATTENTION + "eager.py", "added_logits", r"→ if request\.offsets\.inverse is None:", PERFORMANCE,
           "A product for each pair and a product for each offset give the same logits."),
    # ---- sdpa
    Reason(_ATTENTION + "sdpa.py", "_attend_dense", r"→ if added is None and q\.dtype == torch\.float64:$", PLATFORM,
           "The kernel for CPUs converts a mask of another dtype; others refuse it."),
    Reason(_ATTENTION + "sdpa.py", "attend", r"band\.to\(None\)", PLATFORM,
           "The kernel for CPUs converts a mask of another dtype; others refuse it."),
    Reason(_ATTENTION + "sdpa.py", "_attend_dense", r"→ nothing = ~visible\.any\((None, )?keepdim=True\)", PLATFORM,
           "Where a query may attend to no key, the kernel for CPUs returns zeros as well; older versions return NaN."),
    Reason(_ATTENTION + "sdpa.py", "_in_step", r"inverse is not None and not", EQUIVALENT,
           "Where offsets are listed, positions have gaps, and the comparison of neighbours finds them."),
    Reason(_ATTENTION + "sdpa.py", "_in_step", r"not \(readable\(q_pos\) or readable\(k_pos\)\)", EQUIVALENT,
           "sdpa refuses transforms of torch.func, and compiled code can read neither."),
    Reason(_ATTENTION + "sdpa.py", "(module)", r"^ROWS = 2\*\*22 → ROWS = (2 \* 22|3\*\*22|2\*\*23)$", PERFORMANCE, _MEMORY),
    Reason(_ATTENTION + "sdpa.py", "_attend_dense", r"→ by_index = by_index and request\.scale > 1$", PERFORMANCE,
           "Without the kernel's own causal mask, a mask with a number for every pair says the same."),
    Reason(_ATTENTION + "sdpa.py", "_attend_dense", r"→ q = q\.masked_fill\(nothing, 1\.0\)", TUNING,
           "Any number of moderate size will do for a query whose output is replaced by 0."),
    Reason(_ATTENTION + "sdpa.py", "_attend_band", r"flip\(2\) if (\(lq > 1\) or True|lq >= 1) else", PERFORMANCE,
           "One row in reverse order is the same row."),
    Reason(_ATTENTION + "sdpa.py", "_attend_band", r"if \(len\(outs\) == 1\) and False else", PERFORMANCE,
           "Joining one tensor copies it."),
    Reason(_ATTENTION + "sdpa.py", "_attend_band", r"→ if band\.requires_grad or torch\.is_grad_enabled", PERFORMANCE,
           "Autograd drops the gradient of a band that requires none."),
    Reason(_ATTENTION + "sdpa.py", "BiasGradient.backward", r"if (\(groups > 1\) or True|groups >= 1) else", PERFORMANCE,
           "Repeating every head once copies it."),
    Reason(_ATTENTION + "sdpa.py", "BiasGradient.backward", r"→ step = max\(2,", PERFORMANCE, _MEMORY),
    Reason(_ATTENTION + "sdpa.py", "BiasGradient.backward", r"→ pull -= \(g \* out\[:, :, rows\]\.to\(None\)\)", EQUIVALENT,
           "g is in the wide dtype, and the product of both is promoted to it."),
    Reason(_ATTENTION + "sdpa.py", "BiasGradient.backward", r"→ if band\.shape\[1\] == 1:$", EQUIVALENT,
           "Autograd sums a gradient over dimensions in which the input has size 1; this line only saves it the work."),
    Reason(_ATTENTION + "sdpa.py", "_kernel", r"→ enable_gqa=True if \(k\.shape\[1\] != q\.shape\[1\]\) or True else|→ .* else True,",
           PERFORMANCE, "Groups of one head are repeated once; torch then rules out some of its GPU kernels."),
    Reason(_ATTENTION + "sdpa.py", "_band", r"max\(first \+ n - lo, 1\)\]$", EQUIVALENT,
           "A band before the table has all its columns from before it; one more is cut off by [:, :n]."),
    Reason(_ATTENTION + "sdpa.py", "_band", r"(first \+ n \+ 1 - hi, 0|first \+ n - 1 - hi, 1|first \+ n - 1 \+ hi, 0)\), n\)$", EQUIVALENT,
           "More columns after the last one are cut off by [:, :n] two lines below."),
    Reason(_ATTENTION + "sdpa.py", "_band", r"→ if (lo >= first or|lo > first or hi <= first \+ n - 1|lo > first or hi < first \+ n \+ 1)",
           PERFORMANCE, "Nothing is added before or after, and the same columns are joined again."),
    Reason(_ATTENTION + "sdpa.py", "_band", r"→ if request\.causal and first \+ n (\+ 1 > 0|- 1 >= 0):", PERFORMANCE,
           "No offset of the band is above 0, so that nothing is filled with −∞."),
    Reason(_ATTENTION + "sdpa.py", "_in_step", r"→ .*diff\(dim=\+1\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_ATTENTION + "sdpa.py", "_spans", r"→ .*(keys\.sum\(\+1\)|argmax\(\+1\))", EQUIVALENT, _TWO_DIMENSIONS),
    # ---- flex
    Reason(_ATTENTION + "flex.py", "attend", r"→ columns = (3 \* request\.scheme\.reach \+ 1|2 \* request\.scheme\.reach \+ 2)$",
           PERFORMANCE, "Columns beyond the reach repeat the last one."),
    Reason(_ATTENTION + "flex.py", "attend", r"→ out = _run\(\*inputs\) if \(torch\.compiler\.is_compiling\(\)\) and False",
           PERFORMANCE, "Code that is being compiled would compile the kernel once more, with the same result."),
    Reason(_ATTENTION + "flex.py", "_run", r"if products else 1$", EQUIVALENT,
           "Without tables and products there is no score_mod, which alone reads it."),
    Reason(_ATTENTION + "flex.py", "_run", r"= score_mod if \(tables or products\) or True else", PERFORMANCE,
           "Without tables and products, score_mod returns the score unchanged."),
    Reason(_ATTENTION + "flex.py", "_run", r"enable_gqa=(q\.shape\[2\] != k\.shape\[1\]|q\.shape\[1\] != k\.shape\[2\])", PERFORMANCE,
           "A length is a multiple of 128, so this is True unless there are 128 heads. Groups of one head are no error."),
    Reason(_ATTENTION + "flex.py", "_compiled", r"→ .*torch\.compile\(_run, (dynamic=True|dynamic=None)?\s*\)", PERFORMANCE,
           "Whether torch compiles once for all lengths or for each bucket."),
    Reason(_ATTENTION + "flex.py", "attend", r"columns\), \(0, 1, 0, more_[qk]\)\)$", PERFORMANCE,
           "One column more, which nobody reads."),
    Reason(_ATTENTION + "flex.py", "_products", r"columns \+ product\.shape\[3\]\)\], dim=-1\)$", PERFORMANCE,
           "Columns beyond the reach repeat the last one, and nobody reads them."),
    Reason(_ATTENTION + "flex.py", "_run_compiled", r"^limit = ", PLATFORM,
           "The name of a setting in older versions of torch; this one has both."),
    Reason(_ATTENTION + "flex.py", "bucket", r"blocks <= 3 \* power / 4 else power\)$", EQUIVALENT,
           "Only compared where power is 4, 8, 16, …: 4 divides it."),
    # ---- fused
    Reason(_ATTENTION + "fused.py", "(module)", r'\("XX(stride|data)XX", ctypes', EQUIVALENT,
           "Views are made with positional arguments; nobody reads the names of their fields."),
    Reason(_ATTENTION + "fused.py", "_Kernel.__init__", r"→ .*x\.stride\(\+1\) == 1", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_ATTENTION + "fused.py", "_Kernel.__init__", r"→ .*x\.stride\((None)?\) == 1", PERFORMANCE,
           "All strides are never equal to 1, so positions are always copied."),
    Reason(_ATTENTION + "fused.py", "_Kernel.__init__", r"\((0 if \(b == 1\) and False|1 if b == 1) else x\.stride\(0\)", EQUIVALENT,
           "With one sequence its stride is multiplied by 0."),
    Reason(_ATTENTION + "fused.py", "_Kernel.__init__", r"x\.stride\(-1\) == (2 else|1\) and False)", PERFORMANCE,
           "Contiguous positions are copied too."),
    Reason(_ATTENTION + "fused.py", "_Kernel.set_gradients", r"if \(grads\[name\]\.numel\(\)\) or True else None", EQUIVALENT,
           "The address of a tensor without entries is 0, as that of None."),
    Reason(_ATTENTION + "fused.c", "into_panels", r"^panels: rows beyond the last are not zero", EQUIVALENT,
           "These rows meet weights of 0, or their products are not read."),
    Reason(_ATTENTION + "fused.c", "write_rows", r"^writing ignores the last stride", EQUIVALENT,
           "Outputs and gradients are made by us, and contiguous."),
    Reason(_ATTENTION + "fused.py", "_Kernel.__init__", r"for x in tables\.values\(\)\), 2\)$", EQUIVALENT,
           "Without tables nobody reads their number of columns."),
    Reason(_ATTENTION + "fused.py", "_View.of", r"\[(0 if \(size == 1\) and False|1 if size == 1) else stride", EQUIVALENT,
           "Where there is one entry, its stride is multiplied by 0."),
    Reason(_ATTENTION + "operators.py", "_empty_gradients", r"new_empty\(1\) if x is None", EQUIVALENT,
           "It stands for a tensor that is not there, and nobody reads it."),
    Reason(_ATTENTION + "operators.py", "_define", r"torch\.library\.define\(name, schema, (tags=None)?\s*\)$", PERFORMANCE,
           "The tag tells torch.compile that it need not look into the operator."),
    Reason(_ATTENTION + "fused.c", "row_dropout", r"^dropout: p = 1 keeps some", EQUIVALENT,
           "A dropout of 1 is refused in `prepare`."),
    Reason(_ATTENTION + "fused_call.py", "make_call", r"torch\.zeros\(1, (dtype=None)?\s*\)", EQUIVALENT,
           "Without dropout nothing depends on the seed, and C receives it as a whole number."),
    Reason(_ATTENTION + "operators.py", "_empty_gradients", r"torch\.empty_like\(x, (memory_format=None)?\s*\)", PERFORMANCE,
           "The kernel writes gradients by their strides, in any layout."),
    Reason(_ATTENTION + "operators.py", "_empty_gradients", r"if x is not None or want else", PERFORMANCE,
           "The kernel computes the gradient of a table for which nobody asks. A gradient of None is never wanted."),
    Reason(_ATTENTION + "operators.py", "_hidden_from_compiler", r'^hidden = None → hidden = ""$', EQUIVALENT,
           "Both are false, and nothing else is asked of it."),
    Reason(_ATTENTION + "fused.c", "dropout_factors", r"^dropout: one in 2\^32 more is dropped", TUNING,
           "The limit is p · 2^32, rounded down to a whole number: the share dropped is off by less than 2^−32 either way."),
    # ---- offsets, tables
    Reason(_ATTENTION + "offsets.py", "find_offsets", r"→ .*(amin|amax)\(\+1\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_ATTENTION + "offsets.py", "find_offsets", r"→ .*(amin|amax)\(None\)", PERFORMANCE,
           "The range of the whole batch contains that of each sequence: some columns may be unused."),
    Reason(_ATTENTION + "offsets.py", "find_offsets",
           r"→ if hi - lo (<= 4 \* \(lq \+ lk\)|< 5 \* \(lq \+ lk\)) or", TUNING,
           "From which gap on a list of offsets takes less memory than a table over all of them."),
    Reason(_ATTENTION + "offsets.py", "find_offsets", r"→ return Offsets\((None|1|int\(r\[1\]\)), r\.", EQUIVALENT,
           "The first offset is read only where offsets are consecutive; here they are listed."),
    Reason(_ATTENTION + "offsets.py", "find_offsets", r"→ return Offsets\((0|int\(r\[0\]\)), r\.(numel\(\)|shape\[0\]), None, r", EQUIVALENT,
           "The device is read only where offsets are consecutive; here they are listed."),
    Reason(_ATTENTION + "offsets.py", "find_offsets",
           r"→ return between\(1 - lk, lq - 1 if (\(lq\) or True else 1 - lk|lq else (1 \+ lk|2 - lk))\)$", EQUIVALENT,
           "Without queries there is no pair, and nobody reads a column."),
    Reason(_ATTENTION + "tables.py", "(module)", r"→ COMPARABLE = (2 \* 16|3\*\*16|2\*\*17)$|→ CACHEABLE = (2 \* 22|3\*\*22|2\*\*23)$",
           PERFORMANCE, "Up to which size tables are cached. Cached or computed again, they are the same."),
    Reason(_ATTENTION + "tables.py", "tables", r"→ if sum\(.*\) >= CACHEABLE:$", PERFORMANCE,
           "Up to which size tables are cached. Cached or computed again, they are the same."),
    Reason(_ATTENTION + "tables.py", "tables", r"if \(room\) or True else terms$", PERFORMANCE,
           "Without room `wider` is offsets.r, for which the terms are computed once more."),
    Reason(_ATTENTION + "tables.py", "tables", r"→ first = min\(3 \* lo, lo\)", TUNING,
           "For how many decoding steps to come the tables are computed."),
    Reason(_ATTENTION + "tables.py", "(module)", r"XXtrainingXX", PERFORMANCE,
           "Tables are computed once more after model.train() or model.eval()."),
    # ---- schemes
    Reason(_SCHEMES + "__init__.py", "(module)", r"location\.rpartition\(", EQUIVALENT, "Each has one dot."),
    Reason(_SCHEMES + "__init__.py", "_load", r"location\.rpartition\(", EQUIVALENT, "Each has one dot."),
    Reason(_SCHEMES + "alibi.py", "alibi_slopes", r"range\(1, (2 \* below [+-] [12]|3 \* below \+ 1)\)\]$", EQUIVALENT,
           "Fewer slopes are taken from the list than it has."),
    Reason(_SCHEMES + "base.py", "(module)", r"^SchemeT = ", EQUIVALENT, "For the type checker alone."),
    Reason(_SCHEMES + "base.py", "exact", r"mps", PLATFORM, "Needs a GPU of Apple, which has no float64."),
    Reason(_SCHEMES + "sandwich.py", "Sandwich.terms", r"\.sum\(\+1\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_SCHEMES + "sum.py", "Sum.__init__", r"→ spelled = None$", EQUIVALENT,
           "Only the wording of the error contains it."),
    Reason(_SCHEMES + "t5.py", "T5.bucket", r"where\(distance <= single, distance, grouped\)", EQUIVALENT,
           "The first group begins at `single` with `single` itself: the logarithm there is 0."),
    Reason(_SCHEMES + "xl.py", "XL.terms", r"angle\.cos\(\)\], dim=\+1\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_SCHEMES + "tisa.py", "Tisa.parameter_scale", r"\"offset\": 2 / sharpness", TUNING,
           "The unit of an optimizer's steps: a width, or two."),
    Reason(_SCHEMES + "t5.py", "T5.bucket", r"clamp\(min=2\)", EQUIVALENT,
           "Distances 0 and 1 have buckets of their own, or share the only one beyond them."),
    Reason(_SCHEMES + "base.py", "Scheme.arguments", r'→ found\.pop\("self", \)$', EQUIVALENT,
           "The first argument of a method is self: ruff's N805 checks it here, and every Python guide asks for it."),
    Reason(_SCHEMES + "cope.py", "Cope.__init__", r"table_heads\(self, 2,", EQUIVALENT,
           "table_heads only checks that a clip is at least 1, and CoPE has none."),
    Reason(_SCHEMES + "base.py", "Scheme.__init_subclass__", r"→ cls\.reach = None", EQUIVALENT,
           "The reach of Scheme itself is None."),
    Reason(_SCHEMES + "base.py", "_spell", r"(< 1000000000000001\.0|<= 1e15):$", TUNING,
           "From which size on a whole number is written with an exponent."),
    Reason(_SCHEMES + "cope.py", "Cope.terms", r"k_pos\.gather\(\+1, order\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_SCHEMES + "kerple.py", "Kerple.terms", r"→ distance = exact\(r\.abs\(\)\)\.to\(None\)$", PERFORMANCE,
           "The bias is then computed in float64, and rounded in the end."),
    Reason(_SCHEMES + "sum.py", "_has_vector_gain", r"torch\.zeros\(2, dtype", EQUIVALENT,
           "Only the number of dimensions is read."),
    Reason(_SCHEMES + "cope.py", "Cope.terms", r"→ order = k_pos\.argsort\(dim=\+1\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_SCHEMES + "deberta.py", "Deberta.reach", r"// 10001 ", TUNING,
           "A margin for rounding, several times as wide as needed; a test measures where the last bucket begins."),
    Reason(_SCHEMES + "deberta.py", "Deberta.bucket", r"distance\.abs\(\) < middle, distance, grouped", EQUIVALENT,
           "The first group begins at the middle with the middle itself: the logarithm there is 0."),
    Reason(_SCHEMES + "huang.py", "_VectorTable.__init__", r"self\.start - self\.noise", EQUIVALENT, _SYMMETRIC),
    Reason(_SCHEMES + "fire.py", "Fire.terms", r"→ limit = torch\.maximum\(threshold, q_pos\.to\(None\)\)", EQUIVALENT,
           "maximum promotes integers to the dtype of the threshold, which is that of c."),
    Reason(_SCHEMES + "kerple.py", "Kerple.terms", r"torch\.where\(apart, distance, 2\.0\)", EQUIVALENT,
           "Any positive number will do: it is multiplied by 0, and so are its derivatives."),
    Reason(_SCHEMES + "matching_pursuit.py", "(module)", r"^FAR_CENTRES = .* → FAR_CENTRES = \(", TUNING, _GRID),
    Reason(_SCHEMES + "matching_pursuit.py", "gaussians",
           r"→ centres = .*torch\.arange\((-17, 17\.0|-16, 18\.0)\)|→ sharpnesses = torch\.logspace\((-5, 0\.3, 12|-4, 1\.3, 12|-4, 0\.3, 13),",
           TUNING, _GRID),
    Reason(_SCHEMES + "matching_pursuit.py", "gaussians",
           r"→ sharpnesses = torch\.logspace\(-4, 0\.3, 12, (dtype=None)?\s*\)|torch\.eye\(len\(chosen\), (dtype=None)?\s*\)$", TUNING,
           "A grid, or a ridge of 1e-6, that is rounded to float32 before float64 goes on with it."),
    Reason(_SCHEMES + "matching_pursuit.py", "gaussians", r"→ norms = flat\.norm\(dim=\+1\)|→ chosen\.append\(gain\.argmax\(\+1\)\)",
           EQUIVALENT, "Both have two dimensions, so the dimensions −1 and +1 are the same."),
    Reason(_SCHEMES + "matching_pursuit.py", "gaussians", r"→ amplitude = (None$|torch\.zeros\()", EQUIVALENT,
           "Replaced in the first step. Without steps, torch.stack of nothing raises: callers ask for one Gaussian or more."),
    Reason(_SCHEMES + "matching_pursuit.py", "gaussians", r"\.mT - RIDGE \*|→ root = \(weight \* weight\.sum\(\)\)\.sqrt\(\)$|→ constant = root \* root\.norm\(\)$", TUNING,
           "Weights matter relative to each other; only the size of the ridge relative to them changes."),
    Reason(_SCHEMES + "rope.py", "(module)", r"magnitude: Tensor \| float = 2\.0", EQUIVALENT, "Every caller passes it."),
    Reason(_SCHEMES + "rope.py", "_yarn", r"torch\.arange\(d / 2,", EQUIVALENT, "d is even."),
    Reason(_SCHEMES + "rope.py", "Rope.magnitude", r"self\.factor >= 1 else 1\.0$", EQUIVALENT,
           "For a factor of 1 both are 1: log(1) is 0."),
    Reason(_SCHEMES + "rope.py", "Rope.rotate", r"→ .*amax\(\+1\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_SCHEMES + "rope.py", "rotated", r"\.unsqueeze\(1\)\.to\(None\)", PERFORMANCE,
           "The product is then computed in float64, and rounded to the dtype of x in the end."),
    Reason(_SCHEMES + "sum.py", "Sum.__init__", r"→ sizes = \[\(str\(None\), getattr", EQUIVALENT,
           "Only the wording of the error contains the names of the parts."),
    Reason(_SCHEMES + "sum.py", "Sum.__init__", r"> 1 or rotations\[1\]\.planes is None\)$", EQUIVALENT,
           "Read only if there are two rotations or more and all have the same planes."),
    Reason(_SCHEMES + "xpos.py", "Xpos.rotate", r"→ device = None$", PLATFORM, _DEVICE),
    Reason(_SCHEMES + "xpos.py", "Xpos.rotate", r"→ if growth >= math\.log\(", TUNING,
           "The limit has a margin: it is the square root of the largest number. No span of whole positions meets it exactly."),
    Reason(_SCHEMES + "xpos.py", "Xpos.rotate", r"→ .*(amin|amax)\(\+1\)", EQUIVALENT, _TWO_DIMENSIONS),
    Reason(_SCHEMES + "tisa.py", "Tisa.__init__", r"→ .*Parameter\(0\.1 - 0\.01 \* torch\.randn", EQUIVALENT, _SYMMETRIC),
    Reason(_SCHEMES + "tisa.py", "Tisa.bumps", r"clamp\(min=(None|-81\.0)\)\)$", PERFORMANCE,
           "e^−80 is nothing beside 1; the bound keeps CPUs off numbers that they compute slowly."),
    # ---- experiments
    Reason(_EXPERIMENTS + "statistics.py", "difference", r"\(found\.mean >= 0\) ==", EQUIVALENT,
           "A mean of 0 is inside its interval, and the lines above have returned."),
    Reason(_EXPERIMENTS + "statistics.py", "difference", r"found\.low is None and found\.high is None", EQUIVALENT,
           "Both are None, or neither."),
    Reason(_EXPERIMENTS + "averages.py", "by_position", r"log2\(max\(start, 2\) / trained\)", EQUIVALENT,
           "Up to a trained length of 2 a bin is wider than the eighth of it; beyond, both logarithms are negative."),
    Reason(_EXPERIMENTS + "tasks/glue.py", "Glue._test", r"→ kind = int if \(self\.format\.labels\) and False else float$", EQUIVALENT,
           "For scikit-learn, 0.0 and 1.0 are classes as 0 and 1 are."),
    Reason(_EXPERIMENTS + "tasks/glue.py", "Glue._write", r"return_attention_mask=False, (verbose=True,)?\s*(\)|$)", EQUIVALENT, _VERBOSE),
    *(
        Reason(_EXPERIMENTS + "tasks/squad.py", function, r"→ .*return_(attention_mask=False|offsets_mapping=True),\s*(verbose=True,?)?\s*(\)|$)",
               EQUIVALENT, _VERBOSE)
        for function in ("Windows._cut", "Windows._shortened")
    ),
    Reason(_EXPERIMENTS + "trainer.py", "training_arguments", r"remove_unused_columns=False, (dataloader_pin_memory=None, )?use_cpu=not torch\.cuda\.is_available\(\), \)$",
           EQUIVALENT, "Without a GPU transformers turns it off because of use_cpu; with a GPU it is on by default."),
    # ---- runs
    Reason(_RUNS + "text_source.py", "(module)", r"→ SMALL, DENSEST = (65 \* 2\*\*20, 100|64 \* 2\*\*21, 100|64 \* 2\*\*20, 101)$", TUNING,
           "How far the limit is from what texts compress to is a matter of choice."),
    Reason(_RUNS + "text_source.py", "_standard_library", r"read_text\((encoding=None, )?errors=", PLATFORM,
           "The tests run where texts are in UTF-8 by default."),
    Reason(_RUNS + "glue_files.py", "(module)", r"→ fields: int = 1", EQUIVALENT, "Only a format without a header has fields, and names them."),
    # ---- hf
    Reason(_HF + "rope_settings.py", "options_of", r"abs\(magnitude - 1\) >= 1e-6", TUNING, "No measurement meets the limit exactly."),
    Reason(_HF + "rope_settings.py", "closed_forms", r"- magnitude\) >= 1e-6", TUNING, "No measurement meets the limit exactly."),
    Reason(_HF + "safetensors_header.py", "(module)", r"→ LONGEST = (33 \* 2\*\*20|32 \* 2\*\*21)$", TUNING,
           "How far the limit is from the headers of models is a matter of choice."),
    # ---- hardware
    *(
        Reason(_SCHEMES + path, function, r"→ .*(frequencies\(.*, None\)|slopes\(None\))", PLATFORM, _DEVICE)
        for path, function in (
            ("rope.py", "_plain"), ("rope.py", "_ntk"), ("sandwich.py", "Sandwich.terms"), ("tisa2.py", "Tisa2.terms"),
            ("sinusoidal.py", "Sinusoidal.embed"), ("xl.py", "XL.terms"), ("xpos.py", "Xpos.rotate"),
        )
    ),
)  # fmt: skip


def reason_of(mutant: Mutant) -> Reason | None:
    """The reason of a survivor, if it has one."""
    for reason in REASONS:
        if (reason.path, reason.function) == (mutant.path, mutant.function) and re.search(reason.change, shown(mutant)):
            return reason
    return None
