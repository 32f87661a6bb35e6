{{- define "understudy.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "understudy.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "understudy.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "understudy.apiKey" -}}
{{- if .Values.apiKeySecret }}
- name: VLLM_API_KEY
  valueFrom: { secretKeyRef: { name: {{ .Values.apiKeySecret | quote }}, key: api-key } }
{{- end }}
{{- end }}
