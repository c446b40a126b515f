/* The operations of a step of integers. `Printer` copies those that a model needs, with the words
   in capitals replaced. */

/* Clips to 16 bits without INT16_MIN, which marks no output. */
static inline int16_t clip16(int32_t x)
{
    return (int16_t)(x < -32767 ? -32767 : x > 32767 ? 32767 : x);
}

static inline int16_t clip16_long(int64_t x)
{
    return (int16_t)(x < -32767 ? -32767 : x > 32767 ? 32767 : x);
}

static inline int32_t clip32(int64_t x)
{
    return (int32_t)(x < -2147483647 ? -2147483647 : x > 2147483647 ? 2147483647 : x);
}

/* Clips so that sums of two do not overflow. */
static inline int64_t clip64(int64_t x)
{
    const int64_t most = (int64_t)1 << 61;
    return x < -most ? -most : x > most ? most : x;
}

/* x / 2^shift, rounded. */
static inline int64_t align(int64_t x, int shift)
{
    return shift > 0 ? (x + ((int64_t)1 << (shift - 1))) >> shift : x * ((int64_t)1 << -shift);
}

/* x * 2^shift, or the largest number with 62 bits. */
static inline int64_t raised(int64_t x, int shift)
{
    const int64_t most = ((int64_t)1 << 61) >> shift;
    return (x < -most ? -most : x > most ? most : x) * ((int64_t)1 << shift);
}

/* x / 2^shift, rounded, or the largest number with 62 bits. */
static inline int64_t aligned(int64_t x, int shift)
{
    return shift > 0 ? align(x, shift) : shift < 0 ? raised(x, -shift) : x;
}

/* x / 2^shift, rounded, for numbers of 16 bits and products of two. */
static inline int32_t shifted(int32_t x, int shift)
{
    return shift > 0 ? (x + (1 << (shift - 1))) >> shift : x * (1 << -shift);
}

/* sum * scale / 2^(15 + shift), rounded, for a scale of 15 bits. */
static inline int32_t scaled(int32_t sum, int32_t scale, int shift)
{
    const int32_t part = (sum >> 15) * scale + (((sum & 32767) * scale) >> 15);
    return shifted(shift < 0 ? clip16(part) : part, shift);
}

/* Columns at a time, whose sums are in registers: a core of Cortex-M has few. */
#if defined __ARM_ARCH_PROFILE && __ARM_ARCH_PROFILE == 'M'
#define BLOCK 8
#else
#define BLOCK 64
#endif
/* Columns k to k + m <= k + BLOCK of y = start + x w; w has n columns. */
static inline void columns(
    int k, int m, int n, int16_t *y, const int16_t *x, const int16_t *start, const int8_t *w,
    const int16_t *scale, int rows, int start_shift, int shift)
{
    int32_t sum[BLOCK];
    for (int j = 0; j < m; j++)
        sum[j] = 0;
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < m; j++)
            sum[j] += x[i] * w[i * n + k + j];
    for (int j = 0; j < m; j++)
        sum[j] = scaled(sum[j], scale[k + j], shift);
    if (start)
        for (int j = 0; j < m; j++)
            sum[j] += shifted(start[k + j], start_shift);
    for (int j = 0; j < m; j++)
        y[k + j] = clip16(sum[j]);
}

/* y = start + x w, with a scale for each column; start may be NULL. */
static void product_int8_N(
    int16_t *y, const int16_t *x, const int16_t *start, const int8_t *w, const int16_t *scale,
    int rows, int start_shift, int shift)
{
    int k = 0;
    for (; k + BLOCK <= N; k += BLOCK)
        columns(k, BLOCK, N, y, x, start, w, scale, rows, start_shift, shift);
    if (N % BLOCK)
        columns(k, N % BLOCK, N, y, x, start, w, scale, rows, start_shift, shift);
}

/* Columns k to k + m of y = start + x w, for many rows; w has one column after the other. */
static inline void some_columns(
    int k, int m, int16_t *y, const int16_t *x, const int16_t *start, const int8_t *w,
    const int16_t *scale, int rows, int start_shift, int shift)
{
    int32_t sum[4] = {0};
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < m; j++)
            sum[j] += x[i] * w[(k + j) * rows + i];
    for (int j = 0; j < m; j++) {
        const int32_t more = start ? shifted(start[k + j], start_shift) : 0;
        y[k + j] = clip16(scaled(sum[j], scale[k + j], shift) + more);
    }
}

/* y = start + x w, with a scale for each of the n columns; start may be NULL. */
static void rows_product_int8(
    int16_t *y, const int16_t *x, const int16_t *start, const int8_t *w, const int16_t *scale,
    int n, int rows, int start_shift, int shift)
{
    int k = 0;
    for (; k + 4 <= n; k += 4)
        some_columns(k, 4, y, x, start, w, scale, rows, start_shift, shift);
    if (n % 4)
        some_columns(k, n % 4, y, x, start, w, scale, rows, start_shift, shift);
}

/* y = start + x w, with a shift for each of the n columns. */
static void product_int16(
    int32_t *y, const REAL *x, const int32_t *start, const int16_t *w, const int8_t *shift, int n,
    int rows)
{
    for (int k = 0; k < n; k++, w += rows) {
        int64_t sum = 0;
        for (int i = 0; i < rows; i++)
            sum += (int64_t)x[i] * w[i];
        y[k] = clip32(start[k] + aligned(sum, shift[k]));
    }
}

/* The sums of the terms a * b, with `shift` fewer fractional bits. */
static void sum_products(
    int16_t *y, const int16_t *a, const int16_t *b, int n, int terms,
    int a_term, int a_step, int b_term, int b_step, int shift)
{
    for (int i = 0; i < n; i++) {
        int64_t sum = 0;
        for (int k = 0; k < terms; k++)
            sum += a[k * a_term + i * a_step] * b[k * b_term + i * b_step];
        y[i] = clip16_long(aligned(sum, shift));
    }
}

static void reduce_NAME_OUT(
    OUT *y, const REAL *x, int n, int terms, int term, int step, int shift)
{
    for (int i = 0; i < n; i++) {
        int64_t found = x[i * step];
        for (int k = 1; k < terms; k++) {
            const int64_t next = x[k * term + i * step];
            found = FOLD;
        }
        y[i] = CLIP(aligned(found, shift));
    }
}

/* Interpolates a function of x in a table of 513 values. */
static inline int32_t function(const int16_t *table, int32_t x)
{
    const int32_t place = x + 32768, i = place >> 7;
    return table[i] + (((table[i + 1] - table[i]) * (place & 127) + 64) >> 7);
}

/* Numbers k to k + m of y = a function of x: only the table is read one by one. */
static inline void some_functions(
    int k, int m, int16_t *restrict y, const int16_t *x, const int16_t *table)
{
    int16_t low[16], high[16];
    for (int i = 0; i < m; i++) {
        const int32_t at = (x[k + i] + 32768) >> 7;
        low[i] = table[at];
        high[i] = table[at + 1];
    }
    for (int i = 0; i < m; i++) {
        const int32_t part = (x[k + i] + 32768) & 127;
        y[k + i] = (int16_t)(low[i] + (((high[i] - low[i]) * part + 64) >> 7));
    }
}

static void functions_N(int16_t *restrict y, const int16_t *x, const int16_t *table)
{
    int k = 0;
    for (; k + 16 <= N; k += 16)
        some_functions(k, 16, y, x, table);
    if (N % 16)
        some_functions(k, N % 16, y, x, table);
}

/* Interpolates a function of x in a table of 705 values, 32 for each power of two. */
static inline int32_t function_by_powers(const int16_t *table, int32_t x)
{
    int32_t size = x < 0 ? -x : x, sign = x < 0 ? -1 : 1, shift = 0;
    size = size > 32767 ? 32767 : size;
    while (size >> shift >= 64)
        shift++;
    const int16_t *at = table + 352 + sign * (32 * shift + (size >> shift));
    const int32_t part = size & ((1 << shift) - 1);
    return at[0] + (((at[sign] - at[0]) * part + (1 << shift >> 1)) >> shift);
}

/* The square root of x * 2^shift below 2^62, rounded down; 0 for x < 0. */
static int64_t root(int64_t x, int shift)
{
    int64_t found = 0;
    x = x < 0 ? 0 : x * ((int64_t)1 << shift);
    for (int64_t bit = (int64_t)1 << 30; bit; bit >>= 1)
        if ((found + bit) * (found + bit) <= x)
            found += bit;
    return found;
}

/* The logarithm of x / 2^bits > 0 with 54 fractional bits, by a table of log2(1 + i / 256). */
static int64_t logarithm_by_table(const int32_t *table, int64_t x, int bits)
{
    int exponent = 0;
    x = x < 1 ? 1 : x;
    for (; x >> exponent > 1; exponent++)
        ;
    x = exponent > 32 ? x >> (exponent - 32) : x << (32 - exponent);
    const int64_t part = x & 0xffffffff;
    const int32_t i = (int32_t)(part >> 24), rest = (int32_t)((part >> 8) & 65535);
    const int32_t more = (int32_t)(((int64_t)(table[i + 1] - table[i]) * rest) >> 16);
    const int64_t log2 = (exponent - bits) * (int64_t)16777216 + table[i] + more;
    return log2 * 744261118; /* the logarithm of 2 */
}

/* a / b with extra fractional bits. */
static inline int64_t divide(int64_t a, int64_t b, int bits)
{
    return b == 0 ? 0 : a * ((int64_t)1 << bits) / b;
}

/* A row of a table; zeros for an index outside of it. */
static void lookup_row(
    int16_t *y, const int64_t *index, const int16_t *table, int n, int rows)
{
    for (int i = 0; i < n; i++)
        y[i] = *index < 0 || *index >= rows ? 0 : table[(int)*index * n + i];
}

/* Numbers from the upper 8 of their 16 bits. */
static void expand(int16_t *y, const int8_t *x, int n, int stride)
{
    for (int i = 0; i < n; i++)
        y[i] = (int16_t)(x[i * stride] * 256);
}

/* The upper 8 of 16 bits. */
static void shorten(int8_t *y, const int16_t *x, int n, int stride)
{
    for (int i = 0; i < n; i++) {
        const int32_t rounded = (x[i * stride] + 128) >> 8;
        y[i] = (int8_t)(rounded > 127 ? 127 : rounded);
    }
}
