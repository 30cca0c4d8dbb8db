// Numbers as text, in the format of text_labels.py.

export const NO_SCORE = "no score";

export const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);
const replaceHyphens = (text) => text.replaceAll("-", "−");
const trimZeros = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

// Rounds to significant digits.
export const formatNumber = (value, digits = 4) => {
  if (isMissing(value)) return NO_SCORE;
  if (value === 0 || !Number.isFinite(value)) return replaceHyphens(String(value === 0 ? 0 : value));
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  if (power < -4 || power >= digits) {
    return replaceHyphens(`${trimZeros(mantissa)}e${power[0]}${power.slice(1).padStart(2, "0")}`);
  }
  return replaceHyphens(trimZeros(value.toFixed(Math.max(0, digits - 1 - power))));
};

// Rounds to three significant digits of the largest value, so that columns line up.
export const formatAligned = (value, vmax) => {
  if (isMissing(value)) return NO_SCORE;
  const digits = 2 - Math.floor(Math.log10(vmax));
  if (digits < 0 || digits > 7) {
    const [mantissa, power] = value.toExponential(2).split("e");
    return replaceHyphens(`${mantissa}e${power[0]}${power.slice(1).padStart(2, "0")}`);
  }
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : replaceHyphens(text);
};

export const truncate = (text, maxLength) => (text.length <= maxLength ? text : `${text.slice(0, maxLength - 1)}…`);
