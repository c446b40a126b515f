/* The operations of a step. `Printer` copies those that a model needs, with the words in capitals
   replaced: REAL is the type of the numbers. */

/* The place of a row in a ring. */
static inline int row(int i, int rows) { return i < rows ? i : i - rows; }

/* y = start + x w; a start of NULL means zeros. */
static void product_N(REAL *y, const REAL *start, const REAL *x, const REAL *w, int rows)
{
    REAL sum[N] = {0};
    if (start)
        memcpy(sum, start, sizeof sum);
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < N; k++)
            sum[k] += x[i] * w[i * N + k];
    memcpy(y, sum, sizeof sum);
}

/* y = start + x w, where x consists of rows of a ring, `step` apart, and of z unless it is NULL. */
static void convolution_N(
    REAL *y, const REAL *start, const REAL *ring, int first, int step, int taps, int rows,
    int width, const REAL *z, const REAL *w, int inputs)
{
    REAL sum[N] = {0};
    if (start)
        memcpy(sum, start, sizeof sum);
    for (int t = 0; t < taps + (z != NULL); t++, w += inputs * N) {
        const REAL *x = t < taps ? ring + row(first + t * step, rows) * width : z;
        for (int i = 0; i < inputs; i++)
            for (int k = 0; k < N; k++)
                sum[k] += x[i] * w[i * N + k];
    }
    memcpy(y, sum, sizeof sum);
}

/* y += the sum of the terms a * b. Compilers would unroll every call of attention in a window. */
#if defined __GNUC__
__attribute__((noinline))
#endif
static void add_products(
    REAL *restrict y, int n, int terms,
    const REAL *a, int a_term, int a_step, const REAL *b, int b_term, int b_step)
{
    for (int k = 0; k < terms; k++, a += a_term, b += b_term)
        for (int i = 0; i < n; i++)
            y[i] += a[i * a_step] * b[i * b_step];
}

static inline REAL add(REAL a, REAL b) { return a + b; }

static inline REAL multiply(REAL a, REAL b) { return a * b; }

/* The larger number, or NaN. */
static inline REAL larger(REAL a, REAL b) { return a < b || b != b ? b : a; }

/* The smaller number, or NaN. */
static inline REAL smaller(REAL a, REAL b) { return b < a || b != b ? b : a; }

/* The NAME of n numbers, in eight parts that vectorize. */
static REAL reduce_NAME(REAL first, const REAL *x, int n, int stride)
{
    REAL part[8] = {FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++)
            part[k] = FOLD(part[k], x[(i + k) * stride]);
    for (; i < n; i++)
        part[0] = FOLD(part[0], x[i * stride]);
    for (i = 0; i < 8; i++)
        first = FOLD(first, part[i]);
    return first;
}

/* The NAME of y and x, element by element. */
static void fold_NAME(REAL *restrict y, int n, int terms, const REAL *x, int term, int step)
{
    for (int k = 0; k < terms; k++, x += term)
        for (int i = 0; i < n; i++)
            y[i] = FOLD(y[i], x[i * step]);
}

static void copy(REAL *y, int n, const REAL *x, int stride)
{
    for (int i = 0; i < n; i++)
        y[i] = x[i * stride];
}

static void pick_PLACE(REAL *y, int n, const REAL *x, const PLACE *places)
{
    for (int i = 0; i < n; i++)
        y[i] = x[places[i]];
}

/* A row of a table, NAN for an index outside of it. */
static void lookup(REAL *y, int n, int64_t index, int rows, const REAL *table)
{
    for (int i = 0; i < n; i++)
        y[i] = index < 0 || index >= rows ? NAN : table[(int)index * n + i];
}

/* A column of a matrix in blocks of columns, NAN for an index outside of it. */
static void lookup_in_columns(REAL *y, int n, int64_t index, int columns, const REAL *w, int width)
{
    const int is_inside = index >= 0 && index < columns, at = is_inside ? (int)index : 0;
    const int first = at - at % width, rest = columns - first, size = rest < width ? rest : width;
    for (int i = 0; i < n; i++)
        y[i] = is_inside ? w[first * n + i * size + at - first] : NAN;
}

/* e^x - less for x > -87, without branches, so that loops vectorize. */
static inline float power(float x, float less)
{
    union { float f; uint32_t i; } half; /* of 2^n, which may be too large for a float */
    const float bounded = x > 89.0f ? 89.0f : x < -87.0f ? -87.0f : x;
    const float shifted = bounded * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    const float p =
        ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r
          + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    half.f = shifted;
    half.i = (half.i - 0x4b400000u + 126u) << 23;
    return ((p * r * r + r) * half.f + (half.f - 0.5f * less)) * 2.0f;
}

static inline float exponential(float x) { return x < -87.0f ? 0.0f : power(x, 0.0f); }

static inline float exponential_minus_1(float x) { return power(x, 1.0f); }

static inline float sigmoid(float x) { return 1.0f / (1.0f + power(-x, 0.0f)); }

/* tanh(x): a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel. */
static inline float hyperbolic(float x)
{
    const float z = x * x, far = 1.0f - 2.0f / (power(2.0f * x, 0.0f) + 1.0f);
    const float near =
        ((((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z
          + 1.33314422036e-1f) * z - 3.33332819422e-1f) * z * x + x;
    return z < 0.390625f ? near : far;
}

static inline float logarithm(float x)
{
    union { float f; uint32_t i; } m;
    m.f = x < 1.17549435e-38f ? x * 8388608.0f : x;
    const float scale = x < 1.17549435e-38f ? -149.0f : -126.0f;
    float e = (float)(int)(m.i >> 23) + scale;
    m.i = (m.i & 0x007fffffu) | 0x3f000000u;
    const int low = m.f < 0.707106781f;
    e = low ? e - 1.0f : e;
    const float z = low ? m.f + m.f - 1.0f : m.f - 1.0f, z2 = z * z;
    float p =
        ((((((((7.0376836292e-2f * z - 1.1514610310e-1f) * z + 1.1676998740e-1f) * z
               - 1.2420140846e-1f) * z + 1.4249322787e-1f) * z - 1.6668057665e-1f) * z
            + 2.0000714765e-1f) * z - 2.4999993993e-1f) * z + 3.3333331174e-1f) * z * z2;
    p = (p - 2.12194440e-4f * e - 0.5f * z2) + z + 0.693359375f * e;
    p = x < INFINITY ? p : x;
    return x > 0.0f ? p : x == 0.0f ? -INFINITY : NAN;
}

static inline float logarithm_of_1_plus(float x)
{
    const float y = 1.0f + x, d = y - 1.0f, z = logarithm(y);
    return d == 0.0f ? x : y < INFINITY ? z * (x / d) : z;
}

/* The remainder with the sign of b. */
static inline REAL modulo(REAL a, REAL b)
{
    const REAL r = fmodf(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

/* x without its fraction, at most 9e18; 0 for NaN. */
static inline int64_t whole(REAL x)
{
    const REAL bounded = x < 9e18f ? x > -9e18f ? x : -9e18f : 9e18f;
    return x != x ? 0 : (int64_t)bounded;
}

/* The remainder with the sign of b; of a division by 0, it is 0 as in NumPy. */
static inline int64_t remainder_of(int64_t a, int64_t b)
{
    const int64_t r = b == 0 ? 0 : a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

static inline int64_t quotient_of(int64_t a, int64_t b)
{
    return b == 0 ? 0 : (a - remainder_of(a, b)) / b;
}
