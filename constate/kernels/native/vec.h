/* Vectors of float32 through the compiler's own vector types, and the few functions that the ops need of
 * them. Knows lanes; knows no op. Intrinsics stand only where the compiler does not find them by itself, and
 * each has a plain twin, so that every machine with GCC or Clang runs the same kernels.
 *
 * Vectors may be stored anywhere: loads and stores ask for no alignment beyond a float's. */
#ifndef CONSTATE_VEC_H
#define CONSTATE_VEC_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define ALWAYS static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

ALWAYS vf vload(const float *p) { return *(const vf_any *)p; }
ALWAYS void vstore(float *p, vf x) { *(vf_any *)p = x; }
ALWAYS vf vset(float x) { return x - (vf){0}; }

/* The first n lanes from memory, zeros behind them; n may be LANES or more, or 0 or less. */
ALWAYS vf vload_part(const float *p, int64_t n) {
    if (__builtin_expect(n >= LANES, 1)) return vload(p);
    if (n <= 0) return (vf){0};
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    float whole[LANES] = {0};
    memcpy(whole, p, (size_t)n * sizeof(float));
    return vload(whole);
#endif
}

ALWAYS void vstore_part(float *p, vf x, int64_t n) {
    if (__builtin_expect(n >= LANES, 1)) {
        vstore(p, x);
    } else if (n > 0) {
#if defined(__AVX512F__)
        _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#else
        memcpy(p, &x, (size_t)n * sizeof(float));
#endif
    }
}

/* bfloat16 is the upper half of a float32. Stores round to the nearest, ties to even; a NaN stays one. */
ALWAYS vf vload_bf16(const uint16_t *p) {
#if defined(__AVX512F__) /* GCC 12 widens by halves */
    vi wide = (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    vi wide = (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    vi wide = __builtin_convertvector(*(const vh_any *)p, vi);
#endif
    return (vf)(wide << 16);
}

ALWAYS vi vround_bf16(vf x) {
    vi bits = (vi)x, up = bits + 0x7fff + ((bits >> 16) & 1), nan = (vi)(x != x);
    return ((up & ~nan) | ((bits | 0x400000) & nan)) >> 16;
}

ALWAYS void vstore_bf16(uint16_t *p, vf x) { *(vh_any *)p = __builtin_convertvector(vround_bf16(x), vh); }

ALWAYS vf vload_bf16_part(const uint16_t *p, int64_t n) {
    if (__builtin_expect(n >= LANES, 1)) return vload_bf16(p);
    uint16_t whole[LANES] = {0};
    if (n > 0) memcpy(whole, p, (size_t)n * sizeof(uint16_t));
    return vload_bf16(whole);
}

ALWAYS void vstore_bf16_part(uint16_t *p, vf x, int64_t n) {
    uint16_t whole[LANES];
    if (__builtin_expect(n >= LANES, 1)) {
        vstore_bf16(p, x);
    } else if (n > 0) {
        vstore_bf16(whole, x);
        memcpy(p, whole, (size_t)n * sizeof(uint16_t));
    }
}

/* Where the mask (all bits of a lane, or none) is set a, elsewhere b. */
ALWAYS vf vselect(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* A NaN in `x` stays: it is the second operand, which the instruction hands on. */
ALWAYS vf vmax(vf least, vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)least, (__m512)x);
#elif defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)least, (__m256)x);
#else
    return vselect((vi)(least > x), least, x);
#endif
}

ALWAYS vf vmin(vf most, vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)most, (__m512)x);
#elif defined(__AVX__)
    return (vf)_mm256_min_ps((__m256)most, (__m256)x);
#else
    return vselect((vi)(most < x), most, x);
#endif
}

ALWAYS vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* The sum of all lanes, always in the same order: halves onto halves. */
ALWAYS float vsum(vf x) {
#if defined(__AVX512F__)
    __m512 wide = (__m512)x;
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(wide), 1));
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(wide), upper);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
#else
    float lane[LANES];
    vstore(lane, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

/* 2^x for x >= -126 (a smaller one gives 2^-126, nearly enough nothing) and x < 128. Exactly 1 at 0: a decay
 * of nothing must lose nothing in a million tokens. Relative error 2e-9 and the rounding of six steps; the
 * coefficients are a weighted least-maximum fit on [-1/2, 1/2] that leaves the first one at 1. */
ALWAYS vf vexp2(vf x) {
    const vf magic = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    x = vmax(vset(-126.0f), x);
    vf shifted = x + magic, f = x - (shifted - magic);
    vf p = vset(1.5353354e-4f);
    p = p * f + 1.3398875e-3f;
    p = p * f + 9.618438e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 0.24022648f;
    p = p * f + 0.6931472f;
    p = p * f + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

/* e^x: exactly 1 at 0, 0 below -87 (-inf too), infinity above 88.7; NaN stays. */
ALWAYS vf vexp(vf x) {
    const vf magic = vset(12582912.0f), low = vset(-87.0f), high = vset(88.3f);
    vf t = vmin(high, vmax(low, x)), shifted = t * 1.44269504f + magic, n = shifted - magic;
    vf f = t - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts, the first exact times n */
    vf p = vset(1.3814607e-3f);
    p = p * f + 8.3687156e-3f;
    p = p * f + 4.1668389e-2f;
    p = p * f + 0.16666521f;
    p = p * f + 0.49999994f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    p = (vf)((vi)p + ((vi)shifted << 23));
    p = (vf)((vi)p & ~(vi)(x < low));
    return vselect((vi)(x > high + 0.42f), vset(__builtin_inff()), p);
}

ALWAYS vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
ALWAYS vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

/* log(1 + e^x) = max(x, 0) + log1p(e^-|x|), right to the last bits where e^x is tiny: log1p's argument m lies
 * in [0, 1], and above sqrt(2) - 1 is halved as 1 + m = 2 (1 + (m - 1) / 2), so that one series serves. */
ALWAYS vf vsoftplus(vf x) {
    vf m = vexp(-vabs(x));
    vi upper = (vi)(m > 0.41421356f);
    m = vselect(upper, m * 0.5f - 0.5f, m);
    vf p = vset(8.7348185e-2f);
    p = p * m - 0.14307521f;
    p = p * m + 0.14917982f;
    p = p * m - 0.16570508f;
    p = p * m + 0.19962071f;
    p = p * m - 0.25001755f;
    p = p * m + 0.33333951f;
    p = p * m - 0.49999991f;
    p = p * m * m + m;
    return vmax(vset(0.0f), x) + p + (vf)((vi)vset(0.69314718f) & upper);
}

/* The share [*first, *last) of `count` units that is thread `thread`'s of `threads`. */
ALWAYS void share(int64_t count, int thread, int threads, int64_t *first, int64_t *last) {
    *first = count * thread / threads;
    *last = count * (thread + 1) / threads;
}

#endif
