"""C++ of the operations of programs: expressions, and functions that these call."""

from __future__ import annotations

# Functions that lines may call, each with the C++ of its body; `x`, `y` are floats.
HELPERS = {
    "quotient_of": """float quotient_of(float x, float y, float factor = 1.f) {
    // The reciprocal of the largest would be 0.
    return x * reciprocal_of(y * 0.25f) * (0.25f * factor);
  }""",
    "apart_of": """float apart_of(float x) {
    // Far enough from 0 to be divided by, and as good as 0.
    return x < 0x1p-60f && x > -0x1p-60f ? 0x1p-60f : x;
  }""",
    "times_of": """float times_of(float x, float y) {
    // Rounded before anything is added to it.
#if defined(__CUDACC__)
    return __fmul_rn(x, y);
#else
    return x * y;
#endif
  }""",
    "divided_of": """float divided_of(float x, float y) {
#if defined(__CUDACC__)
    return __fdiv_rn(x, y);
#else
    return x / y;
#endif
  }""",
    "root_of": """float root_of(float x) {
#if defined(__CUDACC__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
  }""",
    "ratio_of": """float ratio_of(float x, float y) {
    // As IEEE's division has it: floors of quotients of integers show the last bit.
    const float ratio = quotient_of(x, y);
#if defined(__CUDACC__)
    const float rest = __fmaf_rn(-ratio, y, x);
#else
    const float rest = __builtin_fmaf(-ratio, y, x);
#endif
    return rest == rest ? ratio + rest * reciprocal_of(y) : ratio;
  }""",
    "exp_of": "float exp_of(float x) { return exp2_of(x * kLog2E); }",
    "sigmoid_of": "float sigmoid_of(float x) { return reciprocal_of(1.f + exp2_of(x * -kLog2E)); }",
    "tanh_of": """float tanh_of(float x) {
    return 1.f - 2.f * reciprocal_of(1.f + exp2_of(x * (2.f * kLog2E)));
  }""",
    "log_of": "float log_of(float x) { return log2_of(x) * kLn2; }",
    "log1p_of": "float log1p_of(float x) { return log2_of(1.f + x) * kLn2; }",
    "expm1_of": "float expm1_of(float x) { return exp2_of(x * kLog2E) - 1.f; }",
    "rsqrt_of": """float rsqrt_of(float x) {
#if defined(__CUDACC__)
    return rsqrtf(x);
#else
    return 1.f / __builtin_sqrtf(x);
#endif
  }""",
    "sqrt_of": """float sqrt_of(float x) {
    return x == 0.f || x == kInfinity ? x : x * rsqrt_of(x);
  }""",
    "floor_of": """float floor_of(float x) {
#if defined(__CUDACC__)
    return floorf(x);
#else
    return __builtin_floorf(x);
#endif
  }""",
    "ceil_of": """float ceil_of(float x) {
#if defined(__CUDACC__)
    return ceilf(x);
#else
    return __builtin_ceilf(x);
#endif
  }""",
    "trunc_of": """float trunc_of(float x) {
#if defined(__CUDACC__)
    return truncf(x);
#else
    return __builtin_truncf(x);
#endif
  }""",
    "round_of": """float round_of(float x) {
#if defined(__CUDACC__)
    return rintf(x);
#else
    return __builtin_rintf(x);
#endif
  }""",
    "wave_of": """float wave_of(float x, float quarter) {
    // Whole turns off in two steps; `quarter` 1 makes a sine a cosine.
    const float turns = round_of(x * 0.15915494f);
    const float rest = (x - turns * 6.28125f) - turns * 1.9353072e-3f;
#if defined(__CUDACC__)
    return quarter != 0.f ? __cosf(rest) : __sinf(rest);
#else
    return quarter != 0.f ? __builtin_cosf(rest) : __builtin_sinf(rest);
#endif
  }""",
    "erf_of": """float erf_of(float x) {
#if defined(__CUDACC__)
    return erff(x);
#else
    return __builtin_erff(x);
#endif
  }""",
    "power_of": """float power_of(float x, float y) {
    const float power = exp2_of(y * log2_of(magnitude_of(x)));
    if (y == 0.f) return 1.f;
    if (x >= 0.f || x != x) return power;
    const float whole = trunc_of(y);
    if (whole != y) return kInfinity - kInfinity;
    return trunc_of(y * 0.5f) * 2.f == y ? power : -power;
  }""",
    "floor_divide": """template <class T>
  ATTNGEN_HD static T floor_divide(T x, T y) {
    if (y == 0) return 0;
    return x / y - (x % y != 0 && (x < 0) != (y < 0));
  }""",
    "remainder_of": """template <class T>
  ATTNGEN_HD static T remainder_of(T x, T y) {
    if (y == 0) return 0;
    const T rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
  }""",
    "lower_of": """template <class T>
  ATTNGEN_HD static T lower_of(T x, T y) { return x != x || x < y ? x : y; }""",
    "higher_of": """template <class T>
  ATTNGEN_HD static T higher_of(T x, T y) { return x != x || x > y ? x : y; }""",
    "index_of": """template <class T>
  ATTNGEN_HD static int index_of(T x, int size) {
    const T counted = x < 0 ? x + size : x;  // from the end
    return static_cast<int>(max_of(min_of(counted, static_cast<T>(size - 1)), static_cast<T>(0)));
  }""",
    "read_of": """template <class T>
  ATTNGEN_HD static T read_of(const void* tensor, long long place) {
#if defined(__CUDACC__)
    return __ldg(static_cast<const T*>(tensor) + place);
#else
    return static_cast<const T*>(tensor)[place];
#endif
  }""",
}
NEEDS = {
    "ratio_of": ("quotient_of",),
    "sqrt_of": ("rsqrt_of",),
    "wave_of": ("round_of",),
    "power_of": ("trunc_of",),
}
# Operations that are one expression of their arguments.
FORMS = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in (
        ("add", "+"), ("sub", "-"), ("mul", "*"), ("and", "&"), ("or", "|"), ("xor", "^"),
        ("shl", "<<"), ("shr", ">>"), ("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"),
        ("eq", "=="), ("ne", "!="))},
    **{name: f"{name}_of({{0}})" for name in (
        "exp", "sigmoid", "tanh", "log", "log1p", "expm1", "rsqrt", "sqrt", "erf")},
    "exp2": "exp2_of({0})",
    "log2": "log2_of({0})",
    "sin": "wave_of({0}, 0.f)",
    "cos": "wave_of({0}, 1.f)",
    "pow": "power_of({0}, {1})",
    "recip": "quotient_of(1.f, {0})",
    "div": "quotient_of({0}, {1})",
    "ratio": "ratio_of({0}, {1})",
    "floor": "floor_of({0})",
    "ceil": "ceil_of({0})",
    "trunc": "trunc_of({0})",
    "round": "round_of({0})",
    "neg": "-{0}",
    "not": "!{0}",
    "invert": "~{0}",
    "min": "lower_of({0}, {1})",
    "max": "higher_of({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "fdiv": "floor_divide({0}, {1})",
    "tdiv": "({1} == 0 ? 0 : {0} / {1})",
    "mod": "remainder_of({0}, {1})",
    "fmod": "({1} == 0 ? 0 : {0} % {1})",
}  # fmt: skip
# Others, of floats and of integers.
SIGNED = {
    "abs": ("magnitude_of({0})", "{0} < 0 ? -{0} : {0}"),
    "sign": ("static_cast<float>(({0} > 0.f) - ({0} < 0.f))", "({0} > 0) - ({0} < 0)"),
}
