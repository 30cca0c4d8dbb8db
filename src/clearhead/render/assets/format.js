// Figures in words, as wording.py says them.

export const NO_SCORE = "no score";

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const minus = (text) => text.replaceAll("-", "−");
const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

// By significant digits.
export const number = (value, digits = 4) => {
  if (missing(value)) return NO_SCORE;
  if (value === 0 || !Number.isFinite(value)) return minus(String(value === 0 ? 0 : value));
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  if (power < -4 || power >= digits) {
    return minus(`${trimmed(mantissa)}e${power[0]}${power.slice(1).padStart(2, "0")}`);
  }
  return minus(trimmed(value.toFixed(Math.max(0, digits - 1 - power))));
};

// To three digits of the largest, so that columns line up.
export const aligned = (value, full) => {
  if (missing(value)) return NO_SCORE;
  const digits = 2 - Math.floor(Math.log10(full));
  if (digits < 0 || digits > 7) {
    const [mantissa, power] = value.toExponential(2).split("e");
    return minus(`${mantissa}e${power[0]}${power.slice(1).padStart(2, "0")}`);
  }
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : minus(text);
};

export const short = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

export const isMissing = missing;
